//! Shared blocks and one file per architecture, generic over the backend.
