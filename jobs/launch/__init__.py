"""Starts one job as many workers, on the engines that clusters already have."""
