"""Captions to the formats of annotation and training, the join to their images checked."""
