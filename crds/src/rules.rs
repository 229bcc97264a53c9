//! CEL rules used at more than one place.

pub(crate) const REPLICAS_XOR_RANGE: &str =
    "!has(self.replicas) || (!has(self.minReplicas) && !has(self.maxReplicas))";
pub(crate) const REPLICAS_XOR_RANGE_SAYS: &str =
    "write either replicas (a fixed number) or minReplicas with maxReplicas (a range), not both";
pub(crate) const RANGE_IS_WHOLE: &str = "has(self.minReplicas) == has(self.maxReplicas)";
pub(crate) const RANGE_IS_WHOLE_SAYS: &str = "write minReplicas and maxReplicas together";
pub(crate) const MIN_UP_TO_MAX: &str =
    "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas";
pub(crate) const MIN_UP_TO_MAX_SAYS: &str = "write a minReplicas that is not above maxReplicas";
pub(crate) const REPLICAS: &str = "self >= 1 && self <= 64";
pub(crate) const REPLICAS_SAYS: &str = "write 1 to 64 workers; the default is 1";
pub(crate) const MIN_REPLICAS: &str = "self >= 0 && self <= 64";
pub(crate) const MIN_REPLICAS_SAYS: &str = "write 0 to 64 workers";
pub(crate) const MAX_REPLICAS: &str = "self >= 1 && self <= 64";
pub(crate) const MAX_REPLICAS_SAYS: &str = "write 1 to 64 workers";
pub(crate) const OBJECT_NAME: &str = "self.matches('^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$')";
pub(crate) const OBJECT_NAME_SAYS: &str =
    "write the object's name: lower-case letters, digits, '-' and '.', at most 253 of them";
pub(crate) const ABSOLUTE: &str = "self.matches('^/') && !self.matches('(^|/)[.][.](/|$)')";
