"""The job around the pipeline: the command line, its settings, and the run itself."""
