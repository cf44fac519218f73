"""What a run keeps on disk: its folder, lock, records, checksums and modes."""
