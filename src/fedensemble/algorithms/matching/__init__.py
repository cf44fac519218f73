"""Matched averaging of hidden units, as in PFNM and FedMA."""
