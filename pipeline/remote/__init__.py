"""Objects in stores and behind HTTP: one seam, one reader that resumes, one S3 client for all."""
