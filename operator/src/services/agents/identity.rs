//! Verification of an agent's identity by the token of its Pod, which the API server reviews.
//!
//! A kubelet gets tokens only for the Pods of its own node, so one node's tokens prove nothing about another. The
//! token is for the operator alone (its audience), and agents reveal it only to a caller with the operator's
//! certificate.

use hearth_controller_core::names::{AGENT_ACCOUNT, TOKEN_AUDIENCE};
use k8s_openapi::api::authentication::v1::{
    TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo,
};
use kube::Client;
use kube::api::{Api, PostParams};

use super::AgentEndpoint;

/// Keys of the claims in a Pod-bound token, besides the user's name. Kubernetes adds the node since 1.30.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Asks the API server whether the token belongs to the Pod at this endpoint.
///
/// # Errors
/// The reason that it does not, or cannot be verified; never includes the token.
pub(super) async fn prove(
    client: &Client,
    namespace: &str,
    agent: &AgentEndpoint,
    token: String,
) -> Result<(), String> {
    let review = TokenReview {
        spec: TokenReviewSpec {
            token: Some(token),
            audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]),
        },
        ..TokenReview::default()
    };
    let api: Api<TokenReview> = Api::all(client.clone());
    let reviewed = api.create(&PostParams::default(), &review).await;
    let reviewed = reviewed.map_err(|error| format!("its token cannot be reviewed: {error}"))?;
    is_of(&reviewed.status.unwrap_or_default(), namespace, agent)
}

/// Whether the reviewed token is the agent's Pod's. Its uid identifies the Pod, and a Pod's node never changes.
fn is_of(status: &TokenReviewStatus, namespace: &str, agent: &AgentEndpoint) -> Result<(), String> {
    let audiences = status.audiences.as_deref().unwrap_or_default();
    let is_for_us = audiences.iter().any(|audience| audience == TOKEN_AUDIENCE);
    if status.authenticated != Some(true) || !is_for_us {
        let why = status.error.as_deref().unwrap_or("it is not for Hearth");
        return Err(format!("its token is not valid: {why}"));
    }
    let user = status.user.clone().unwrap_or_default();
    let account = format!("system:serviceaccount:{namespace}:{AGENT_ACCOUNT}");
    if user.username.as_deref() != Some(&*account) {
        let name = user.username.unwrap_or_default();
        return Err(format!("its token is of {name:?}, not of {account:?}"));
    }
    if extra(&user, POD_UID) != Some(&*agent.pod_uid) {
        return Err(format!(
            "its token is of another Pod than the agent's of node {}",
            agent.node
        ));
    }
    match extra(&user, NODE_NAME) {
        Some(node) if node != agent.node => Err(format!("its token is of node {node:?}")),
        _ => Ok(()),
    }
}

/// Returns the only value of a key.
fn extra<'a>(user: &'a UserInfo, key: &str) -> Option<&'a str> {
    match user.extra.as_ref()?.get(key)?.as_slice() {
        [value] => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Result for the token of the agent's Pod `uid-1` on node `a`, after `change`.
    fn verdict(change: impl FnOnce(&mut Value)) -> Result<(), String> {
        let mut status = json!({
            "authenticated": true, "audiences": [TOKEN_AUDIENCE],
            "user": {
                "username": "system:serviceaccount:hearth-system:hearth-agent",
                "extra": {POD_UID: ["uid-1"], NODE_NAME: ["a"]},
            },
        });
        change(&mut status);
        let status: TokenReviewStatus = serde_json::from_value(status).expect("status");
        let agent = AgentEndpoint {
            node: "a".to_owned(),
            address: "10.0.0.1".to_owned(),
            pod_uid: "uid-1".to_owned(),
        };
        is_of(&status, "hearth-system", &agent)
    }

    #[test]
    fn a_token_is_of_one_pod_of_the_agents() {
        assert_eq!(verdict(|_| {}), Ok(()));
        // Before 1.30 a token does not name its node, but the Pod's node is known.
        let extra = |status: &mut Value, key: &str, value: Value| {
            status["user"]["extra"][key] = value;
        };
        let without = verdict(|status| {
            let extra = status["user"]["extra"].as_object_mut();
            extra.expect("extra").remove(NODE_NAME);
        });
        assert_eq!(without, Ok(()));

        let user = "system:serviceaccount:default:hearth-agent";
        let cases = [
            (
                verdict(|s| *s = json!({"error": "token expired"})),
                "token expired",
            ),
            (verdict(|s| s["authenticated"] = json!(false)), "not valid"),
            (verdict(|s| s["audiences"] = json!(["api"])), "not valid"),
            (verdict(|s| s["audiences"] = json!(null)), "not valid"),
            (verdict(|s| s["user"]["username"] = json!(user)), user),
            (
                verdict(|s| extra(s, POD_UID, json!(["uid-2"]))),
                "another Pod",
            ),
            (
                verdict(|s| extra(s, POD_UID, json!(["uid-1", "uid-2"]))),
                "another Pod",
            ),
            (verdict(|s| s["user"]["extra"] = json!(null)), "another Pod"),
            (verdict(|s| extra(s, NODE_NAME, json!(["b"]))), "node \"b\""),
        ];
        for (verdict, words) in cases {
            let why = verdict.expect_err(words);
            assert!(why.contains(words), "{why}");
        }
    }
}
