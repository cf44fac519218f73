"""Matched averaging of hidden units: the parts of PFNM and FedMA."""
