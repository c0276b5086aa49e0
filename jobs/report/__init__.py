"""One page, with nothing outside it, that shows a job's captions beside their pictures."""
