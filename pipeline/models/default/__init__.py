"""The embedded default model: a small captioner that needs no download. See MODEL_CARD.md."""
