"""The shared meaning: grammar, op table, printer, checks.  Imports nothing of pk outside this folder."""
