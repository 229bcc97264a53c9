//! Virtual devices that stand for the GPUs of nodes, as every agent of a cluster is told.

use clap::Args;

use crate::tools::VirtualDevice;

/// Which node has which virtual device; shared by what runs on each node.
#[derive(Args)]
pub(crate) struct StandInArgs {
    /// Name of the node, as the profile gives it
    #[arg(long, value_name = "NAME")]
    pub(crate) node: String,
    /// A virtual device in place of the GPUs of a node, such as attic=virtual:memory=8Gi; * is every other node
    // Set through the environment, so that older images start with a newer chart.
    #[arg(
        long = "virtual-device",
        value_name = "NODE=DEVICE",
        env = "HEARTH_VIRTUAL_DEVICES",
        value_delimiter = ';'
    )]
    virtual_devices: Vec<OnNode>,
}

impl StandInArgs {
    /// The virtual device of this node.
    pub(crate) fn device(&self) -> Option<VirtualDevice> {
        let of = |name: &str| self.virtual_devices.iter().find(|it| it.node == name);
        let found = of(&self.node).or_else(|| of(EVERY_NODE))?;
        Some(found.device.clone())
    }
}

/// A virtual device for one node, or for every node that has no other.
#[derive(Clone, Debug)]
struct OnNode {
    node: String,
    device: VirtualDevice,
}

/// Name that means every node.
const EVERY_NODE: &str = "*";

impl std::str::FromStr for OnNode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (node, device) = text
            .split_once('=')
            .filter(|(node, _)| !node.is_empty() && !node.contains(':'))
            .ok_or("write the node first, as in attic=virtual:memory=8Gi, or * for every node")?;
        Ok(Self {
            node: node.to_owned(),
            device: device.parse()?,
        })
    }
}
