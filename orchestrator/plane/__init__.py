"""PURE decision core of the AdminPlane: events in, commands out."""
