//! The object of a node's profile, and the decision whether its status is rewritten: pure.

use hearth_controller_core::names::{APP, LABEL_APP, LABEL_COMPONENT, LABEL_MANAGED_BY, MANAGER};
use hearth_crds::{MemoryProfile, NodeModel, NodeProfile, NodeProfileSpec, NodeProfileStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::spare::WINDOW;

const HOUR_SECONDS: u32 = 3600;

/// The object without its status. It goes with its node.
pub(super) fn profile_object(node: &str, node_uid: String) -> NodeProfile {
    let mut profile = NodeProfile::new(node, NodeProfileSpec {});
    let labels = [
        (LABEL_APP, APP),
        (LABEL_MANAGED_BY, MANAGER),
        (LABEL_COMPONENT, "agent"),
    ];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    profile.metadata.labels = Some(labels.into());
    profile.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_owned(),
        uid: node_uid,
        ..OwnerReference::default()
    }]);
    profile
}

/// Returns the profile to be written for a node, if any. `held_bytes` is the memory requested by Hearth's Pods on it.
///
/// `memory.availableBytes` is the total that Hearth may use. A node reports what a new program can have; how much of
/// their requests Hearth's Pods have already taken is unknown, since weights are page cache and a KV cache fills up
/// slowly. So the memory that Hearth may use lies between the two sums, with and without the Pods, and the written
/// value stays unless it is outside of them by more than a tenth of the memory: a profile is not a clock, and each
/// change to it causes every deployment to be replanned.
///
/// The least of a day ([`spare`](super::spare)) in `measured` stays as it was written for the same reason, and is never more
/// than what is available.
///
/// What the node's store has is written when it changes, and nothing else with it: it is no reason to plan anew.
pub(super) fn due_profile(
    stored: Option<&NodeProfileStatus>,
    mut measured: NodeProfileStatus,
    held_bytes: u64,
) -> Option<NodeProfileStatus> {
    measured.models = NodeModel::listed(measured.models);
    let total = measured.memory.total_bytes;
    let least = measured.memory.available_bytes;
    let most = least.saturating_add(held_bytes).min(total.max(least));
    let Some(stored) = stored else {
        measured.memory.available_bytes = most;
        let memory = &mut measured.memory;
        memory.least_available_bytes = memory.least_available_bytes.map(|bytes| bytes.min(most));
        return Some(measured);
    };
    let (before, slack) = (stored.memory.available_bytes, total / 10);
    let available = if before.saturating_add(slack) < least {
        least
    } else if before > most.saturating_add(slack) {
        most
    } else {
        before
    };
    let least = steady_least(&stored.memory, &measured.memory, available);
    let is_least_news =
        least != stored.memory.least_available_bytes || is_longer(&stored.memory, &measured.memory);
    measured.memory.available_bytes = available;
    measured.memory.least_available_bytes = least;
    let is_news = available != before
        || is_least_news
        || hardware(stored.clone()) != hardware(measured.clone());
    if is_news {
        return Some(measured);
    }
    let with_store = NodeProfileStatus {
        store: measured.store,
        models: measured.models,
        ..stored.clone()
    };
    (with_store != *stored).then_some(with_store)
}

/// The least that was available, as it is written if it has moved by no more than a tenth of the memory.
fn steady_least(
    stored: &MemoryProfile,
    measured: &MemoryProfile,
    available_bytes: u64,
) -> Option<u64> {
    let now = measured.least_available_bytes?.min(available_bytes);
    let slack = measured.total_bytes / 10;
    let before = stored.least_available_bytes;
    let is_steady = |before: &u64| *before <= available_bytes && before.abs_diff(now) <= slack;
    Some(before.filter(is_steady).unwrap_or(now))
}

/// Whether it has been watched for an hour or a day, and less is written: a least of minutes would be taken for no more
/// than that.
fn is_longer(stored: &MemoryProfile, measured: &MemoryProfile) -> bool {
    let marks = [
        HOUR_SECONDS,
        u32::try_from(WINDOW.as_secs()).unwrap_or(u32::MAX),
    ];
    let mut marks = marks.into_iter();
    let (before, now) = (stored.least_over_seconds, measured.least_over_seconds);
    marks.any(|mark| before < mark && now >= mark)
}

/// The profile without values that change from minute to minute, and without the models.
fn hardware(profile: NodeProfileStatus) -> NodeProfileStatus {
    let mut profile = profile.without_store();
    profile.memory.available_bytes = 0;
    profile.memory.least_available_bytes = None;
    profile.memory.least_over_seconds = 0;
    profile.measured_at = String::new();
    for numa in &mut profile.numa_nodes {
        numa.free_bytes = 0;
    }
    for gpu in &mut profile.gpus {
        gpu.free_bytes = 0;
        if let Some(link) = &mut gpu.pcie {
            // An idle GPU downgrades its link.
            (link.generation, link.width) = (0, 0);
        }
    }
    for disk in &mut profile.disks {
        disk.free_bytes = 0;
    }
    profile
}

#[cfg(test)]
mod tests {
    use hearth_crds::{CpuProfile, GpuProfile, NodeStore, NumaNodeProfile, PcieLink};

    use super::*;

    fn profile(available_bytes: u64) -> NodeProfileStatus {
        NodeProfileStatus {
            node: "a".to_owned(),
            cpus: vec![CpuProfile::default()],
            numa_nodes: vec![NumaNodeProfile {
                free_bytes: available_bytes,
                ..NumaNodeProfile::default()
            }],
            memory: MemoryProfile {
                total_bytes: 1000,
                available_bytes,
                ..MemoryProfile::default()
            },
            measured_at: available_bytes.to_string(),
            ..NodeProfileStatus::default()
        }
    }

    /// Name, stored, measured and held bytes, and the value written.
    type Case = (&'static str, Option<u64>, u64, u64, Option<u64>);

    const CASES: [Case; 11] = [
        ("the first time", None, 800, 0, Some(800)),
        ("the first time, with Pods there", None, 500, 200, Some(700)),
        ("never more than there is", None, 900, 500, Some(1000)),
        ("unchanged", Some(800), 800, 0, None),
        ("a little more", Some(800), 900, 0, None),
        ("much more", Some(800), 901, 0, Some(901)),
        ("a little less", Some(800), 700, 0, None),
        ("much less", Some(800), 699, 0, Some(699)),
        ("less by what our Pods took", Some(800), 300, 500, None),
        ("our Pods map page cache", Some(800), 790, 500, None),
        (
            "others took it beside our Pods",
            Some(800),
            100,
            500,
            Some(600),
        ),
    ];

    #[test]
    fn only_what_moved_is_written() {
        for (what, stored, measured, held, written) in CASES {
            let stored = stored.map(profile);
            let due = due_profile(stored.as_ref(), profile(measured), held);
            let available = due.as_ref().map(|due| due.memory.available_bytes);
            assert_eq!(available, written, "{what}");
            // A profile that was just written is not written again.
            if let Some(due) = due {
                assert_eq!(
                    due_profile(Some(&due), profile(measured), held),
                    None,
                    "{what}"
                );
            }
        }
    }

    /// What is written after so many bytes at least in so many seconds, of 800 that are available.
    fn least_after(
        stored: (Option<u64>, u32),
        measured: (Option<u64>, u32),
    ) -> Option<Option<u64>> {
        let with = |(least, seconds)| {
            let mut profile = profile(800);
            profile.memory.least_available_bytes = least;
            profile.memory.least_over_seconds = seconds;
            profile
        };
        let due = due_profile(Some(&with(stored)), with(measured), 0)?;
        assert_eq!(due_profile(Some(&due), with(measured), 0), None);
        Some(due.memory.least_available_bytes)
    }

    #[test]
    fn the_least_of_a_day_is_written_where_it_moved_or_is_that_of_longer() {
        const DAY: u32 = 86_400;
        assert_eq!(least_after((None, 0), (Some(700), 60)), Some(Some(700)));
        assert_eq!(least_after((Some(700), 60), (Some(610), 1000)), None);
        assert_eq!(
            least_after((Some(700), 60), (Some(599), 1000)),
            Some(Some(599))
        );
        assert_eq!(
            least_after((Some(500), DAY), (Some(601), DAY)),
            Some(Some(601))
        );
        // As it was written, after an hour and a day.
        assert_eq!(
            least_after((Some(700), 60), (Some(650), 3600)),
            Some(Some(700))
        );
        assert_eq!(
            least_after((Some(700), 3600), (Some(650), DAY)),
            Some(Some(700))
        );
        assert_eq!(least_after((Some(700), 3600), (Some(650), DAY - 1)), None);
        // No more than there is, and nothing where an agent does not watch.
        assert_eq!(least_after((Some(700), DAY), (Some(1000), DAY)), None);
        assert_eq!(
            least_after((Some(600), DAY), (Some(1000), DAY)),
            Some(Some(800))
        );
        assert_eq!(least_after((Some(600), DAY), (None, 0)), Some(None));
    }

    #[test]
    fn new_hardware_is_written_at_once_with_the_memory_as_it_was() {
        let stored = profile(800);
        let mut measured = profile(790);
        measured.cpus.push(CpuProfile {
            id: 1,
            ..CpuProfile::default()
        });
        let due = due_profile(Some(&stored), measured, 0).expect("due");
        assert_eq!((due.cpus.len(), due.memory.available_bytes), (2, 800));
    }

    #[test]
    fn what_the_store_has_is_written_alone_and_once() {
        let stored = profile(800);
        let with_models = |sources: &[&str]| NodeProfileStatus {
            store: Some(NodeStore {
                models: 1,
                bytes: 5,
            }),
            models: sources
                .iter()
                .map(|source| NodeModel {
                    key: (*source).to_owned(),
                    source: (*source).to_owned(),
                    ..NodeModel::default()
                })
                .collect(),
            ..profile(790)
        };
        let due = due_profile(Some(&stored), with_models(&["b", "a"]), 0).expect("due");
        let sources: Vec<&str> = due.models.iter().map(|model| &*model.source).collect();
        assert_eq!(sources, ["a", "b"]);
        assert_eq!(due.clone().without_store(), stored);
        assert_eq!(due_profile(Some(&due), with_models(&["a", "b"]), 0), None);
        // Of an agent of an earlier version.
        let due = due_profile(Some(&due), profile(790), 0);
        assert_eq!(due, Some(stored));
    }

    #[test]
    fn a_gpu_that_idles_or_fills_is_the_same_gpu() {
        let with_gpu = |free_bytes, generation| {
            let link = PcieLink {
                generation,
                width: 16,
                max_generation: 4,
                max_width: 16,
            };
            let gpu = GpuProfile {
                uuid: "GPU-1".to_owned(),
                memory_bytes: 1000,
                free_bytes,
                pcie: Some(link),
                ..GpuProfile::default()
            };
            NodeProfileStatus {
                gpus: vec![gpu],
                ..profile(800)
            }
        };
        let stored = with_gpu(900, 4);
        assert_eq!(due_profile(Some(&stored), with_gpu(10, 1), 0), None);
        let mut another = with_gpu(900, 4);
        another.gpus[0].memory_bytes = 2000;
        assert!(due_profile(Some(&stored), another, 0).is_some());
        assert!(due_profile(Some(&profile(800)), stored, 0).is_some());
    }
}
