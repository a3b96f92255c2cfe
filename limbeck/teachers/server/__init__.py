"""A teacher behind an OpenAI-compatible server: client, protocol, teacher."""
