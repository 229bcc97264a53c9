//! API types of hearth.dev/v1alpha1.
