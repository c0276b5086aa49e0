"""The networks in plain torch, one file a checkpoint family."""
