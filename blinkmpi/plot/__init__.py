"""Pictures of a ``machine`` and of ``trees`` in it; ``layout`` says where everything lies."""
