"""Sources of documents: the standard library, files, SlimPajama here or on the Hub."""
