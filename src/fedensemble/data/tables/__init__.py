"""Tables of users: read from CSV and Parquet files, and encoded as numbers."""
