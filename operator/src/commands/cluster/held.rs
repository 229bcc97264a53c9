//! What nodes have of models, as their profiles tell it, in words.

use std::collections::BTreeMap;

use hearth_crds::{ModelSource, NodeModel, NodeProfileStatus, NodeStore};
use jiff::Timestamp;
use serde::Serialize;

use crate::terminal::ui::bytes;

/// A model on a node.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OnNode {
    pub(super) node: String,
    #[serde(flatten)]
    pub(super) model: NodeModel,
}

/// What the nodes have of a deployment's model, by node. `None` if profiles do not name it: it is not fetched, or one namespace
/// alone may have it.
pub(super) fn on_nodes(
    source: &ModelSource,
    namespace: &str,
    profiles: &BTreeMap<String, NodeProfileStatus>,
) -> Option<Vec<OnNode>> {
    let key = source.store_key(namespace)?;
    if !source.holder(namespace).is_empty() {
        return None;
    }
    let on_node = |(node, profile): (&String, &NodeProfileStatus)| {
        let model = profile.models.iter().find(|model| model.key == key)?;
        Some(OnNode {
            node: node.clone(),
            model: model.clone(),
        })
    };
    Some(profiles.iter().filter_map(on_node).collect())
}

/// What becomes of a model on its node: `43 % from attic`, or `in use, pinned`.
pub(super) fn state(model: &NodeModel, now: Timestamp) -> String {
    if let Some(fetch) = &model.fetch {
        let percent = fetch.percent.map(|percent| format!("{percent} %"));
        let how_far = percent.unwrap_or_else(|| "fetching".to_owned());
        let from = fetch.from_node.as_ref();
        return how_far + &from.map_or_else(String::new, |node| format!(" from {node}"));
    }
    let used = match (model.in_use, &model.last_used) {
        (true, _) => Some("in use".to_owned()),
        (false, used) => used.as_ref().and_then(|hour| used_ago(hour, now)),
    };
    let pinned = model.pinned.then(|| "pinned".to_owned());
    let is_unverified = model.verified_at.is_none();
    let unverified = is_unverified.then(|| "not verified".to_owned());
    let words = [used, pinned, unverified].into_iter().flatten();
    words.collect::<Vec<String>>().join(", ")
}

/// Time since an hour in which something was used.
fn used_ago(hour: &str, now: Timestamp) -> Option<String> {
    let hour: Timestamp = hour.parse().ok()?;
    let hours = now.as_second().saturating_sub(hour.as_second()) / 3600;
    Some(match hours {
        ..1 => "used this hour".to_owned(),
        1..48 => format!("used {hours} h ago"),
        _ => format!("used {} d ago", hours / 24),
    })
}

/// Rows of a node's models: node, model, commit, size and state.
pub(super) fn rows(
    node: &str,
    store: Option<NodeStore>,
    models: &[NodeModel],
    now: Timestamp,
) -> Vec<[String; 5]> {
    const COMMIT_DIGITS: usize = 12;
    let row = |model: &NodeModel| {
        let total_bytes = model.fetch.as_ref().map(|fetch| fetch.total_bytes);
        let size = total_bytes.unwrap_or(Some(model.bytes)).map(bytes);
        let commit = model.commit.as_deref().unwrap_or("-");
        [
            node.to_owned(),
            model.source.clone(),
            commit.chars().take(COMMIT_DIGITS).collect(),
            size.unwrap_or_else(|| "-".to_owned()),
            state(model, now),
        ]
    };
    let mut rows: Vec<[String; 5]> = models.iter().map(row).collect();
    let whole = models.iter().filter(|model| model.fetch.is_none());
    let named = whole.fold(NodeStore::default(), |sum, model| NodeStore {
        models: sum.models + 1,
        bytes: sum.bytes.saturating_add(model.bytes),
    });
    let store = store.unwrap_or_default();
    let others = store.models.saturating_sub(named.models);
    if others > 0 {
        rows.push([
            node.to_owned(),
            format!("{others} not named"),
            "-".to_owned(),
            // The store's size is rounded up.
            format!("up to {}", bytes(store.bytes.saturating_sub(named.bytes))),
            String::new(),
        ]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use hearth_crds::{HuggingFaceSource, NodeFetch, SecretRef};

    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn model(source: &str) -> NodeModel {
        NodeModel {
            source: source.to_owned(),
            bytes: 4 << 30,
            verified_at: Some("2026-01-01T00:00:00Z".to_owned()),
            last_used: Some("2026-01-01T10:00:00Z".to_owned()),
            ..NodeModel::default()
        }
    }

    #[test]
    fn a_model_is_used_pinned_or_arriving() {
        let told = |change: &dyn Fn(&mut NodeModel)| {
            let mut model = model("a/b@main");
            change(&mut model);
            state(&model, at("2026-01-01T12:59:00Z"))
        };
        assert_eq!(told(&|_| ()), "used 2 h ago");
        assert_eq!(told(&|it| it.pinned = true), "used 2 h ago, pinned");
        assert_eq!(told(&|it| it.in_use = true), "in use");
        let unverified = told(&|it| (it.verified_at, it.last_used) = (None, None));
        assert_eq!(unverified, "not verified");
        let hour = |text: &str| {
            let text = text.to_owned();
            told(&|it| it.last_used = Some(text.clone()))
        };
        assert_eq!(hour("2026-01-01T12:00:00Z"), "used this hour");
        assert_eq!(hour("2025-12-29T12:00:00Z"), "used 3 d ago");
        let fetch = |percent, from_node: Option<&str>| NodeFetch {
            percent,
            total_bytes: None,
            from_node: from_node.map(str::to_owned),
        };
        let half = fetch(Some(43), Some("attic"));
        assert_eq!(told(&|it| it.fetch = Some(half.clone())), "43 % from attic");
        let unknown = fetch(None, None);
        assert_eq!(told(&|it| it.fetch = Some(unknown.clone())), "fetching");
    }

    #[test]
    fn what_is_not_named_is_the_rest_of_the_store() {
        let store = NodeStore {
            models: 3,
            bytes: 6 << 30,
        };
        let now = at("2026-01-01T12:00:00Z");
        let told = rows("attic", Some(store), &[model("a/b@main")], now);
        assert_eq!(told[0][1..4], ["a/b@main", "-", "4 GiB"]);
        assert_eq!(told[1][1..4], ["2 not named", "-", "up to 2 GiB"]);
        assert!(rows("attic", None, &[], now).is_empty());
    }

    #[test]
    fn a_model_that_a_secret_opens_is_looked_for_in_no_profile() {
        let source = |secret: Option<&str>| ModelSource {
            hugging_face: Some(HuggingFaceSource {
                repo: "a/b".to_owned(),
                revision: None,
                token_secret_ref: secret.map(|name| SecretRef {
                    name: name.to_owned(),
                }),
            }),
            ..ModelSource::default()
        };
        let key = source(None).store_key("team").unwrap();
        let profile = NodeProfileStatus {
            models: vec![NodeModel {
                key,
                ..model("a/b@main")
            }],
            ..NodeProfileStatus::default()
        };
        let profiles = BTreeMap::from([("attic".to_owned(), profile)]);
        let found = on_nodes(&source(None), "team", &profiles).unwrap();
        assert_eq!(found[0].node, "attic");
        assert_eq!(on_nodes(&source(Some("hub")), "team", &profiles), None);
        assert_eq!(on_nodes(&ModelSource::default(), "team", &profiles), None);
    }
}
