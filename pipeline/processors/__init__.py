"""From an RGB image and a prompt to pixels and token ids, one file a checkpoint family."""
