"""Files and folders: typed readers, atomic writing, checksums, and deletion of one's own alone."""
