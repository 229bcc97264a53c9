//! Permission to change the number of workers of a pool, and its bounds.

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::rules;

/// Permission to change `replicas` of a pool, and its bounds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(
        validation = Rule::new("(has(self.mode) && self.mode != 'Static') || (!has(self.minReplicas) && !has(self.maxReplicas))")
            .message("remove minReplicas and maxReplicas: with mode Static the number is that of replicas. In a cluster, mode Auto lets Hearth follow the load within them, and External keeps an autoscaler's number within them"),
        validation = Rule::new(rules::MIN_UP_TO_MAX).message(rules::MIN_UP_TO_MAX_SAYS).field_path(".minReplicas"),
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScalingSpec {
    /// Static: replicas is the deployment's own number; an autoscaler of decode workers may still write it, without bounds.
    /// External: an
    /// autoscaler changes it, such as a HorizontalPodAutoscaler or KEDA, for decode through the deployment's scale
    /// subresource, for prefill through that of the InferencePoolScaler NAME-prefill, which the operator creates.
    /// Auto: Hearth itself, between minReplicas and maxReplicas, so that objectives are kept: more workers at once, also for load
    /// that is expected when they are ready; fewer when they have sufficed for as long as a worker takes to start, 1 to 5 minutes. replicas is the number to begin with.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(extend("maxLength" = 16)))]
    pub mode: ScalingMode,
    /// Minimum number of workers, whatever the load or the autoscaler requests. Only with mode Auto or External. By default 1. 0 for
    /// decode lets all workers end, prefill workers among them: with mode Auto while there are no requests
    /// (autoscaling.scaleToZeroAfter), with mode External while the autoscaler asks for none. The gateway stays and holds requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 0 && self <= 64").message("write 0 to 64 workers"))
    )]
    pub min_replicas: Option<u32>,
    /// Maximum number of workers, whatever the load or the autoscaler requests. Only with mode Auto or External. By default 64.
    /// Nodes bound it, too: a worker that fits on none is not added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 1 && self <= 64").message("write 1 to 64 workers"))
    )]
    pub max_replicas: Option<u32>,
}

/// Party that may change the number of workers of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum ScalingMode {
    /// The author of the deployment.
    #[default]
    Static,
    /// Hearth, by the load that gateways measure.
    Auto,
    /// An autoscaler in the cluster.
    External,
}

impl ScalingSpec {
    /// Whether an autoscaler in the cluster changes the number of workers.
    pub fn is_external(&self) -> bool {
        self.mode == ScalingMode::External
    }

    /// Whether the number of workers is changed while the deployment's author does nothing.
    pub fn is_dynamic(&self) -> bool {
        self.mode != ScalingMode::Static
    }

    /// Whether Hearth changes the number of workers, by the load.
    pub fn is_auto(&self) -> bool {
        self.mode == ScalingMode::Auto
    }

    /// Whether the pool's workers may all end while there are no requests.
    pub fn may_rest(&self) -> bool {
        self.is_auto() && self.min_replicas == Some(0)
    }

    /// Whether an autoscaler in the cluster may have all of the pool's workers end, and start again.
    pub fn may_be_emptied(&self) -> bool {
        self.is_external() && self.min_replicas == Some(0)
    }

    /// Returns the number within the bounds that is nearest to `replicas`; at least 1.
    pub fn bounded(&self, replicas: u32) -> u32 {
        let at_least = replicas.max(self.min_replicas.unwrap_or(1));
        at_least.min(self.max_replicas.unwrap_or(u32::MAX)).max(1)
    }
}

/// Returns the number of workers to plan for.
pub(crate) fn planned(replicas: Option<u32>, scaling: Option<&ScalingSpec>) -> u32 {
    match scaling {
        None => replicas.unwrap_or(1).max(1),
        Some(scaling) => scaling.bounded(replicas.unwrap_or(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_kept_within_the_bounds_that_are_written() {
        let scaling = |min_replicas, max_replicas| ScalingSpec {
            mode: ScalingMode::External,
            min_replicas,
            max_replicas,
        };
        for (min, max, asked, kept) in [
            (None, None, 40, 40),
            (None, None, 0, 1),
            (Some(2), Some(4), 1, 2),
            (Some(2), Some(4), 3, 3),
            (Some(2), Some(4), 1000, 4),
            (None, Some(4), 5, 4),
            (Some(3), None, 1, 3),
            // Admission refuses these; here they must not panic.
            (Some(4), Some(2), 3, 2),
            (Some(0), Some(0), 3, 1),
        ] {
            assert_eq!(
                scaling(min, max).bounded(asked),
                kept,
                "{min:?} {max:?} {asked}"
            );
        }
        assert_eq!(planned(None, Some(&scaling(Some(2), None))), 2);
        assert_eq!(planned(Some(3), None), 3);
        assert_eq!(planned(None, None), 1);
    }
}
