//! A device plugin (`v1beta1`): offers devices of a node to its kubelet, which gives each to one container.
//!
//! The kubelet learns of a plugin's socket by a call to its own, in the same directory. A kubelet that starts removes all
//! sockets of plugins there, and has to be told again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tonic::transport::{Endpoint, Server, Uri};
use tonic::{Request, Response, Status};

use crate::client::innermost;
use v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use v1beta1::registration_client::RegistrationClient;
use v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions,
    Empty, ListAndWatchResponse, RegisterRequest,
};

/// Messages and services of the kubelet, generated from `proto/kubelet`.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// The kubelet's own socket in the directory.
const KUBELET: &str = "kubelet.sock";
/// Time limit for telling the kubelet.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between looks whether the plugin's socket is still there.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Devices of a node, and the resource that they are offered as.
#[derive(Clone, Debug)]
pub struct DeviceOffer {
    /// The kubelet's directory of sockets, in most clusters `/var/lib/kubelet/device-plugins`.
    pub directory: PathBuf,
    /// Name of the plugin's socket there.
    pub socket: String,
    /// Name of the resource that containers request, such as `nvidia.com/gpu`.
    pub resource: String,
    /// IDs of the devices, unique on the node.
    pub devices: Vec<String>,
}

/// Reason that devices cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum DeviceOfferError {
    /// The plugin's socket cannot be made.
    #[error(
        "cannot listen on {path}: {reason}; run as root, with the kubelet's directory of device plugins"
    )]
    Listen {
        /// The socket.
        path: String,
        /// The system's error.
        reason: std::io::Error,
    },
    /// The kubelet did not take the offer.
    #[error(
        "the kubelet at {path} cannot be told of {resource}: {reason}; is this its directory of device plugins?"
    )]
    Register {
        /// The kubelet's socket.
        path: String,
        /// The resource.
        resource: String,
        /// Its answer, or the error of the connection.
        reason: String,
    },
    /// The plugin's server failed.
    #[error("serving on {path} ended: {reason}")]
    Serve {
        /// The socket.
        path: String,
        /// tonic's error.
        reason: String,
    },
}

impl DeviceOffer {
    /// Offers the devices until the kubelet has forgotten them because it has started again. Requires a tokio runtime.
    /// Dropping the future removes the socket; calls in progress end with the process.
    ///
    /// # Errors
    /// [`DeviceOfferError`]; trying again is reasonable after each.
    pub async fn serve(&self) -> Result<(), DeviceOfferError> {
        let path = self.directory.join(&self.socket);
        let shown = path.display().to_string();
        let listening = Listening::at(&path).map_err(|reason| DeviceOfferError::Listen {
            path: shown.clone(),
            reason,
        })?;
        let plugin = DevicePluginServer::new(Plugin {
            devices: self.devices.clone(),
        });
        let serving = Server::builder()
            .add_service(plugin)
            .serve_with_incoming(listening.connections());
        let offering = async {
            self.register().await?;
            tracing::info!(
                resource = self.resource,
                devices = self.devices.len(),
                "offered to the kubelet"
            );
            while path.exists() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            Ok(())
        };
        tokio::select! {
            served = serving => Err(DeviceOfferError::Serve {
                path: shown,
                reason: served.err().map_or_else(String::new, |error| innermost(&error)),
            }),
            offered = offering => offered,
        }
    }

    async fn register(&self) -> Result<(), DeviceOfferError> {
        let kubelet = self.directory.join(KUBELET);
        let failed = |reason: String| DeviceOfferError::Register {
            path: kubelet.display().to_string(),
            resource: self.resource.clone(),
            reason,
        };
        let socket = kubelet.clone();
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        // The address is not used: the connection is to the socket.
        let channel = Endpoint::from_static("http://localhost")
            .timeout(REGISTER_TIMEOUT)
            .connect_timeout(REGISTER_TIMEOUT)
            .connect_with_connector(connect)
            .await
            .map_err(|error| failed(innermost(&error)))?;
        let request = RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: self.socket.clone(),
            resource_name: self.resource.clone(),
            options: Some(DevicePluginOptions::default()),
        };
        let told = RegistrationClient::new(channel).register(request).await;
        told.map_err(|status| failed(status.message().to_owned()))?;
        Ok(())
    }
}

/// A listening socket whose file is removed with it.
struct Listening {
    listener: UnixListener,
    path: PathBuf,
}

impl Listening {
    /// Listens at `path`, in place of a plugin that was killed.
    fn at(path: &Path) -> std::io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        Ok(Self {
            listener: UnixListener::bind(path)?,
            path: path.to_owned(),
        })
    }

    fn connections(self) -> impl Stream<Item = std::io::Result<UnixStream>> {
        stream::unfold(self, |listening| async move {
            let accepted = listening.listener.accept().await;
            Some((accepted.map(|(stream, _)| stream), listening))
        })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Implements the kubelet's `DevicePlugin`.
struct Plugin {
    devices: Vec<String>,
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = stream::BoxStream<'static, Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    /// The devices once: they do not change. The stream has no end, since that would take them back.
    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |id: &String| Device {
            id: id.clone(),
            health: "Healthy".to_owned(),
        };
        let devices = self.devices.iter().map(device).collect();
        let all = stream::iter([Ok(ListAndWatchResponse { devices })]);
        Ok(Response::new(all.chain(stream::pending()).boxed()))
    }

    /// A container needs nothing in it for such a device.
    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        for container in &containers {
            tracing::info!(devices = ?container.devices_ids, "given to a container");
        }
        let container_responses = containers
            .iter()
            .map(|_| ContainerAllocateResponse::default())
            .collect();
        Ok(Response::new(AllocateResponse {
            container_responses,
        }))
    }
}
