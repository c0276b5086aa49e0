"""Two outputs of the same images, side by side."""
