//! `kubectl hearth chat`: a conversation with a deployment, through a port that is forwarded to its gateway.

use anyhow::anyhow;
use clap::Args;
use hearth_controller_core::names::GATEWAY_PORT;
use hearth_controller_core::observed::PodView;

use super::access::Access;
use super::forward::Forward;
use crate::commands::chat::{TalkArgs, talk};
use crate::http::openai::Client;

const EXAMPLES: &str = "Examples:\n  kubectl hearth chat demo\n  kubectl hearth chat demo --message 'What is a KV cache?'";

/// Arguments of `kubectl hearth chat`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ChatArgs {
    /// Which deployment
    name: String,
    #[command(flatten)]
    talk: TalkArgs,
}

/// Chats until the end of input; the forwarded port ends with it.
pub(super) async fn run(args: &ChatArgs, access: &Access) -> anyhow::Result<()> {
    let (listed, deployment) = access.deployment(&args.name).await?;
    let pods = access.pods(&listed).await?;
    let gateway = pods.iter().find(|pod| is_open(pod)).ok_or_else(|| {
        anyhow!(
            "{} has no gateway that is ready\n  {} status {} tells why",
            args.name,
            access.program,
            args.name
        )
    })?;
    let namespace = &listed.key.namespace;
    let forward = Forward::open(access, namespace, &gateway.name, GATEWAY_PORT).await?;
    let base = format!("{}/v1", forward.base());
    let status = deployment.status.as_ref();
    let model = status.and_then(|status| status.model.as_ref());
    let model = model.map(|model| model.served_name.as_str());
    let key = args.talk.api_key.as_deref();
    let mut client = Client::new(&base, model.unwrap_or_default(), key, None)?;
    client.program = access.program;
    if model.is_none() {
        client.model = client.first_model().await?;
    }
    talk(&client, &args.talk, &Vec::new).await
}

/// Whether a Pod is a gateway that takes requests.
pub(super) fn is_open(pod: &PodView) -> bool {
    pod.role.is_gateway() && pod.is_ready && !pod.is_deleting
}
