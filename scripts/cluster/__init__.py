"""Runs captionjob on real cluster engines and servers, all of them on this machine's loopback."""
