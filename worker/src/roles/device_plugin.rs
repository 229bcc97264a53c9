//! `hearth-worker device-plugin`: offers a node's virtual device to its kubelet, as NVIDIA's device plugin offers GPUs.
//!
//! The scheduler and the kubelet then treat it as a GPU: one container has it at a time. Nodes without a virtual device
//! are left alone, since their GPUs may be offered by NVIDIA's own.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hearth_crds::GPU_RESOURCE;
use hearth_transport::DeviceOffer;

use super::stand_ins::StandInArgs;
use crate::signals;

/// Name of the socket.
const SOCKET: &str = "hearth-virtual-device.sock";
/// Time between two attempts to offer the device.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Arguments of `device-plugin`.
#[derive(Args)]
pub(crate) struct DevicePluginArgs {
    #[command(flatten)]
    stand_in: StandInArgs,
    /// The kubelet's directory of device plugins
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    directory: PathBuf,
}

/// Offers the device until told to stop.
pub(crate) fn run(args: &DevicePluginArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        tokio::select! {
            () = offer(args) => {}
            () = signals::termination() => {}
        }
    });
    Ok(())
}

async fn offer(args: &DevicePluginArgs) {
    let node = &args.stand_in.node;
    let Some(device) = args.stand_in.device() else {
        tracing::info!(node, "no virtual device is configured here to be offered");
        return std::future::pending().await;
    };
    tracing::info!(node, device = device.text(), "to be offered");
    let offer = DeviceOffer {
        directory: args.directory.clone(),
        socket: SOCKET.to_owned(),
        resource: GPU_RESOURCE.to_owned(),
        devices: device.uuids().collect(),
    };
    let mut told = String::new();
    loop {
        let words = match offer.serve().await {
            Ok(()) => "the kubelet has started again".to_owned(),
            Err(error) => error.to_string(),
        };
        // A kubelet that is away is tried until it is back.
        if told != words {
            tracing::warn!("{words}");
            told = words;
        }
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}
