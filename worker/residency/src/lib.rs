//! Where a module's weights live and how they come to be where they are used.
