"""The test pictures of seven other projects, run through the reader, the opener and the command."""
