//! Causes for a Pod not being ready: a reason for programs to match and a sentence for people to act on.

use hearth_crds::{DEVICE_LOST_EXIT_CODE, PlanRole, format_bytes};

use crate::observed::forbidden::is_quota;
use crate::observed::{ContainerEnd, PodRole, PodView};

/// Maximum number of characters that are quoted from another program's message.
const QUOTED_CHARS: usize = 300;

/// Cause of a deviation from the desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    /// Reason in CamelCase.
    pub(crate) reason: &'static str,
    /// Sentence for people, with the remedy.
    pub(crate) message: String,
    /// Whether it will not resolve itself within a short time.
    pub(crate) is_trouble: bool,
    /// Whether it says less than an earlier message about the same trouble, which is then kept.
    pub(crate) is_vague: bool,
}

impl Cause {
    pub(crate) fn trouble(reason: &'static str, message: String) -> Self {
        Self {
            reason,
            message,
            is_trouble: true,
            is_vague: false,
        }
    }

    pub(crate) fn waiting(reason: &'static str, message: String) -> Self {
        Self {
            is_trouble: false,
            ..Self::trouble(reason, message)
        }
    }
}

/// Cause that keeps `pod` from being ready; `what` names it, such as `decode-0`.
pub(crate) fn cause(what: &str, pod: &PodView) -> Cause {
    if pod.is_deleting {
        return Cause::waiting("Stopping", format!("{what} is being stopped"));
    }
    if pod.has_ended() {
        return ended(what, pod);
    }
    if let Some(cause) = not_placed(what, pod) {
        return cause;
    }
    if let Some(cause) = waiting_container(what, pod) {
        return cause;
    }
    let end = pod
        .container
        .as_ref()
        .and_then(|container| container.last_end.as_ref());
    if let Some(end) = end {
        return crashed(what, pod, end);
    }
    if pod.is_setting_up {
        return setting_up(what, pod);
    }
    match pod.role {
        PodRole::Rank(PlanRole::Gateway) => Cause::waiting(
            "Starting",
            format!("{what} is starting on {}", node_of(pod)),
        ),
        PodRole::Inspect => Cause::waiting(
            "Inspecting",
            format!("{what} is reading the model on {}", node_of(pod)),
        ),
        PodRole::Rank(PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage) | PodRole::Other => {
            Cause::waiting(
                "LoadingModel",
                format!("{what} is loading the model on {}", node_of(pod)),
            )
        }
    }
}

/// Cause of a missing Pod: the API server forbids it.
pub(crate) fn not_allowed(what: &str, words: &str) -> Cause {
    let (reason, remedy) = if is_quota(words) {
        (
            "QuotaExceeded",
            "raise the namespace's ResourceQuota, free some of it, or ask for less in the spec",
        )
    } else if words.contains("PodSecurity") {
        (
            "NotAllowed",
            "allow such Pods in the namespace, or change the spec",
        )
    } else {
        (
            "NotAllowed",
            "check the namespace's LimitRange, admission policies, webhooks",
        )
    };
    let words = quoted(words);
    Cause::trouble(
        reason,
        format!("{what} cannot be created: {words}; {remedy}"),
    )
}

/// Cause of a rank losing its readiness while its Pod's container runs; `is_hung`: a gateway receives nothing from it.
pub(crate) fn lost_readiness(what: &str, pod: &PodView, is_hung: bool) -> Cause {
    let node = node_of(pod);
    if is_hung {
        let restarted_by = match pod.second {
            Some(_) => "its supervisor",
            None => "the kubelet",
        };
        return Cause::trouble(
            "Hung",
            format!(
                "{what} hangs on {node}: its process runs and answers nothing. Its streams go on elsewhere; \
                 {restarted_by} starts it again if it does not come back"
            ),
        );
    }
    if pod.second.is_some() {
        return Cause::trouble(
            "ReadinessLost",
            format!(
                "{what} on {node} was ready and is not: its process has ended or cannot compute; its supervisor starts it \
                 again, and the other rank of its Pod goes on"
            ),
        );
    }
    Cause::trouble(
        "ReadinessLost",
        format!(
            "{what} runs on {node} and does not say that it is ready, as it did before; the kubelet starts it again if it \
             does not answer"
        ),
    )
}

/// The node of a Pod: the one that it is bound to, or else the one that it was made for.
pub(crate) fn node_of(pod: &PodView) -> &str {
    if pod.node.is_empty() {
        &pod.wanted_node
    } else {
        &pod.node
    }
}

/// The error in the last lines of a log: from the last line that begins with `error:`, or the last line.
pub(crate) fn last_words(log: &str) -> String {
    let lines: Vec<&str> = log
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let from = lines.iter().rposition(|line| line.starts_with("error:"));
    let words = match from {
        Some(first) => lines[first..].join(". "),
        None => lines.last().copied().unwrap_or_default().to_owned(),
    };
    let words = words.strip_prefix("error:").unwrap_or(&words).trim();
    quoted(words)
}

/// Another program's message on one line, truncated.
pub(crate) fn quoted(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = text.trim_end_matches('.');
    match text.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn ended(what: &str, pod: &PodView) -> Cause {
    let node = node_of(pod);
    let words = quoted(&pod.message);
    if pod.reason == "Evicted" {
        return Cause::trouble(
            "Evicted",
            format!(
                "{what} was evicted from {node}: {words}. It will be recreated; free memory or disk space on {node} \
                 if this repeats"
            ),
        );
    }
    let end = pod
        .container
        .as_ref()
        .and_then(|container| container.last_end.as_ref());
    match end {
        Some(end) if end.exit_code != 0 => crashed(what, pod, end),
        _ if pod.reason.is_empty() => Cause::trouble(
            "Ended",
            format!("{what} ended on {node}; it will be recreated"),
        ),
        _ => Cause::trouble(
            "Rejected",
            format!(
                "{what} was rejected by {node} ({}): {words}. It will be recreated",
                pod.reason
            ),
        ),
    }
}

fn not_placed(what: &str, pod: &PodView) -> Option<Cause> {
    if !pod.node.is_empty() {
        return None;
    }
    let place = match pod.wanted_node.as_str() {
        "" => String::new(),
        node => format!(" on {node}"),
    };
    let Some(words) = &pod.unschedulable else {
        return Some(Cause::waiting(
            "WaitingForNode",
            format!("{what} is waiting to be scheduled{place}"),
        ));
    };
    let remedy = if words.contains("Insufficient") {
        format!("free resources{place}, or ask for less in the spec")
    } else if words.contains("persistentvolumeclaim") || words.contains("PersistentVolumeClaims") {
        "create the claim that spec.model.source.persistentVolumeClaim names, in the deployment's namespace".to_owned()
    } else if words.contains("taint") {
        "tolerate the taint in spec.placement.tolerations, or remove it from the node".to_owned()
    } else {
        "see kubectl describe pod for the scheduler's reasons".to_owned()
    };
    Some(Cause::trouble(
        "Unschedulable",
        format!(
            "{what} cannot be scheduled{place}: {}; {remedy}",
            scheduler_words(words)
        ),
    ))
}

/// The scheduler's message without the part about preemption.
pub(crate) fn scheduler_words(words: &str) -> String {
    let words = words.strip_prefix("Unschedulable: ").unwrap_or(words);
    let main = words.split(" preemption:").next().unwrap_or(words);
    quoted(main)
}

fn waiting_container(what: &str, pod: &PodView) -> Option<Cause> {
    let container = pod.container.as_ref()?;
    let (reason, message) = container.waiting.as_ref()?;
    let image = &container.image;
    let node = node_of(pod);
    match reason.as_str() {
        "ImagePullBackOff"
        | "ErrImagePull"
        | "ErrImageNeverPull"
        | "InvalidImageName"
        | "RegistryUnavailable"
        | "ImageInspectError" => {
            let words = pull_words(message);
            let is_vague = words.is_empty();
            let words = if is_vague {
                String::new()
            } else {
                format!(": {words}")
            };
            let remedy = if reason == "ErrImageNeverPull" {
                format!("load it onto {node}, or set image.pullPolicy to IfNotPresent")
            } else {
                "check the chart's worker image and its pull Secrets, and that the node reaches the registry".to_owned()
            };
            Some(Cause {
                is_vague,
                ..Cause::trouble(
                    "ImagePullFailed",
                    format!(
                        "{what}: the image {image} cannot be pulled on {node}{words}; {remedy}"
                    ),
                )
            })
        }
        "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
            let words = quoted(message);
            let remedy = match secret_name(message) {
                Some(secret) => format!("create the Secret {secret} in the deployment's namespace"),
                None => "see kubectl describe pod".to_owned(),
            };
            Some(Cause::trouble(
                "ContainerNotCreated",
                format!("{what} cannot be started on {node}: {words}; {remedy}"),
            ))
        }
        _ => None,
    }
}

/// The registry's message. The kubelet alternates it with a line that only says that it is waiting.
fn pull_words(message: &str) -> String {
    let told = match message.split_once("ErrImagePull: ") {
        Some((_, told)) => told,
        None if message.starts_with("Back-off pulling image") => "",
        None => message,
    };
    let told = told
        .rsplit_once("rpc error: ")
        .map_or(told, |(_, told)| told);
    quoted(told)
}

/// The name in `secret "keys" not found` or `references non-existent secret key`.
fn secret_name(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("secret \"")?;
    rest.split_once('"').map(|(name, _)| name)
}

fn crashed(what: &str, pod: &PodView, end: &ContainerEnd) -> Cause {
    let node = node_of(pod);
    if end.reason == "OOMKilled" {
        return Cause::trouble(
            "OutOfMemory",
            format!(
                "{what} was OOM-killed on {node}; its plan gives it {}. Lower \
                 spec.model.contextLength or spec.decode.maxBatch, or free memory on {node}",
                format_bytes(pod.memory_bytes)
            ),
        );
    }
    let words = last_words(&end.message);
    if end.exit_code == i32::from(DEVICE_LOST_EXIT_CODE) {
        let message = format!("{what} has lost its GPU on {node}: {words}");
        return Cause::trouble("GpuLost", message);
    }
    let how = match end.exit_code {
        0 => "ended by itself".to_owned(),
        code @ 129..=192 => format!("was ended by signal {}", code - 128),
        code => format!("ended with exit code {code}"),
    };
    let is_vague = words.is_empty();
    let words = if is_vague {
        "; it logged nothing".to_owned()
    } else {
        format!(": {words}")
    };
    Cause {
        is_vague,
        ..Cause::trouble("Crashed", format!("{what} {how} on {node}{words}"))
    }
}

fn setting_up(what: &str, pod: &PodView) -> Cause {
    let node = node_of(pod);
    let Some(warning) = &pod.setup_warning else {
        return Cause::waiting("Starting", format!("{what} is being set up on {node}"));
    };
    let remedy = match secret_name(warning) {
        Some(secret) => format!("create the Secret {secret} in the deployment's namespace"),
        None if warning.contains("hostPath type check failed") => {
            format!("put the model's directory on {node}, or correct the path in spec.model.source")
        }
        None => "see kubectl describe pod".to_owned(),
    };
    let is_mount =
        warning.contains("Mount") || warning.contains("mount") || warning.contains("volume");
    let (reason, part) = if is_mount {
        ("MountFailed", "a volume cannot be mounted")
    } else {
        ("SetupFailed", "it cannot be set up")
    };
    Cause::trouble(
        reason,
        format!(
            "{what} waits on {node}, {part}: {}; {remedy}",
            quoted(warning)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::ContainerView;

    fn pod() -> PodView {
        PodView {
            name: "demo-decode-0-0123abcd".to_owned(),
            role: PodRole::Rank(PlanRole::Decode),
            rank: "decode-0".to_owned(),
            node: "office".to_owned(),
            wanted_node: "office".to_owned(),
            phase: "Running".to_owned(),
            memory_bytes: 3 << 29,
            ..PodView::default()
        }
    }

    fn with_container(container: ContainerView) -> PodView {
        PodView {
            container: Some(container),
            ..pod()
        }
    }

    fn waiting(reason: &str, message: &str) -> PodView {
        with_container(ContainerView {
            waiting: Some((reason.to_owned(), message.to_owned())),
            image: "hearth/worker:1".to_owned(),
            ..ContainerView::default()
        })
    }

    fn dead(exit_code: i32, reason: &str, message: &str) -> PodView {
        with_container(ContainerView {
            restarts: 3,
            waiting: Some((
                "CrashLoopBackOff".to_owned(),
                "back-off 40s restarting failed container".to_owned(),
            )),
            last_end: Some(ContainerEnd {
                exit_code,
                reason: reason.to_owned(),
                message: message.to_owned(),
            }),
            ..ContainerView::default()
        })
    }

    fn says(pod: &PodView) -> (&'static str, String) {
        let cause = cause("decode-0", pod);
        (cause.reason, cause.message)
    }

    #[test]
    fn the_scheduler_is_quoted() {
        let pod = PodView {
            node: String::new(),
            unschedulable: Some(
                "Unschedulable: 0/2 nodes are available: 1 Insufficient memory, 1 node(s) didn't match Pod's node \
                 affinity/selector. preemption: 0/2 nodes are available: 2 No preemption victims found."
                    .to_owned(),
            ),
            ..pod()
        };
        let (reason, message) = says(&pod);
        assert_eq!(reason, "Unschedulable");
        assert!(message.contains("1 Insufficient memory"), "{message}");
        assert!(message.contains("free resources on office"), "{message}");
        assert!(!message.contains("preemption"), "{message}");
    }

    #[test]
    fn an_image_that_cannot_be_pulled_is_named() {
        let detailed = waiting(
            "ImagePullBackOff",
            "Back-off pulling image \"hearth/worker:1\": ErrImagePull: rpc error: code = NotFound desc = no such tag",
        );
        let (reason, message) = says(&detailed);
        assert_eq!(reason, "ImagePullFailed");
        // The Pod's image, which may be of another plan than the operator's own image.
        assert!(
            message.contains("the image hearth/worker:1 cannot"),
            "{message}"
        );
        assert!(message.contains("no such tag"), "{message}");
        let vague = waiting(
            "ImagePullBackOff",
            "Back-off pulling image \"hearth/worker:1\"",
        );
        assert!(cause("decode-0", &vague).is_vague);
    }

    #[test]
    fn a_crash_has_its_exit_code_and_its_last_words_and_no_count_or_clock() {
        let log =
            "loading\nerror: model.safetensors is shorter than its header says\n  copy it again\n";
        assert_eq!(
            says(&dead(1, "Error", log)),
            (
                "Crashed",
                "decode-0 ended with exit code 1 on office: model.safetensors is shorter than its header says. \
                 copy it again"
                    .to_owned()
            )
        );
        let (_, message) = says(&dead(139, "Error", "one\ntwo\n"));
        assert_eq!(message, "decode-0 was ended by signal 11 on office: two");
        assert!(cause("decode-0", &dead(1, "Error", "")).is_vague);
    }

    #[test]
    fn killed_for_memory_says_how_much_it_had() {
        let (reason, message) = says(&dead(137, "OOMKilled", ""));
        assert_eq!(reason, "OutOfMemory");
        assert!(message.contains("1.5 GiB"), "{message}");
    }

    #[test]
    fn a_missing_secret_is_named() {
        let (reason, message) = says(&waiting(
            "CreateContainerConfigError",
            "secret \"keys\" not found",
        ));
        assert_eq!(reason, "ContainerNotCreated");
        assert!(message.contains("create the Secret keys"), "{message}");
        let mount = PodView {
            is_setting_up: true,
            setup_warning: Some(
                "FailedMount: MountVolume.SetUp failed for volume \"keys\" : secret \"keys\" not found".to_owned(),
            ),
            ..pod()
        };
        let (reason, message) = says(&mount);
        assert_eq!(reason, "MountFailed");
        assert!(message.contains("create the Secret keys"), "{message}");
    }

    #[test]
    fn ends_of_whole_pods() {
        let evicted = PodView {
            phase: "Failed".to_owned(),
            reason: "Evicted".to_owned(),
            message: "The node was low on resource: memory.".to_owned(),
            ..pod()
        };
        let (reason, message) = says(&evicted);
        assert_eq!(reason, "Evicted");
        assert!(message.contains("low on resource: memory"), "{message}");
        let rejected = PodView {
            reason: "OutOfnvidia.com/gpu".to_owned(),
            ..evicted
        };
        assert_eq!(says(&rejected).0, "Rejected");
    }

    #[test]
    fn what_passes_by_itself_is_no_trouble() {
        for (pod, reason) in [
            (pod(), "LoadingModel"),
            (
                PodView {
                    role: PodRole::Rank(PlanRole::Gateway),
                    ..pod()
                },
                "Starting",
            ),
            (
                PodView {
                    is_deleting: true,
                    ..pod()
                },
                "Stopping",
            ),
            (
                PodView {
                    node: String::new(),
                    ..pod()
                },
                "WaitingForNode",
            ),
            (waiting("ContainerCreating", ""), "LoadingModel"),
        ] {
            let cause = cause("decode-0", &pod);
            assert_eq!((cause.reason, cause.is_trouble), (reason, false));
        }
    }

    #[test]
    fn long_words_are_cut() {
        let words = quoted(&"ä".repeat(1000));
        assert_eq!(words.chars().count(), QUOTED_CHARS + 1);
    }
}
