"""Real clients: the same round over Flower's Grid, one message a visit. Needs the extra `flower`.

The server's side is `engine` (with `enrol` and `checks`), a client's side `client` (with `memory`);
`wire` is what travels between them.
"""
