"""Pictures: bytes that nobody trusts, opened as upright RGB or refused with a code."""
