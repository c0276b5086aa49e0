"""`captionjob bench`: where the time goes on this machine and data, and what is faster."""
