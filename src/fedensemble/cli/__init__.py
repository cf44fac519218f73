"""What the commands do; `cli` loads each of them when it is asked for."""
