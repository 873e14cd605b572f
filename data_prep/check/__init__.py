"""Check prepared data: integrity, duplicates, lengths of documents, samples."""
