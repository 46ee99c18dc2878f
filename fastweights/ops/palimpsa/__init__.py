from .api import palimpsa, palimpsa_posterior

__all__ = ["palimpsa", "palimpsa_posterior"]
