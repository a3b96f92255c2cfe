"""Material that tests of several packages share: tokenizers, models, run files, servers, conversations."""
