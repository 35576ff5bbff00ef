"""Arrays whose operations run on the engine: contexts, memory, recording, and symbols."""
