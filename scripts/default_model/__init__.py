"""How the embedded default model was made: fetch, features, concepts, train, pack, evaluate."""
