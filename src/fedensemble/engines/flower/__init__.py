"""Trains on real clients over Flower's Grid, one message per visit. Needs the extra `flower`.

Server side: `engine` runs a round, `roster` identifies the clients, `collector` gathers replies and
`reply_validation` checks them. Client side: `client` trains, `client_state` stores what a client
keeps between rounds. `messages` defines what travels between the two.
"""
