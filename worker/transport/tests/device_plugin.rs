//! Devices offered to a kubelet, which is one of this test's making here.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::path::{Path, PathBuf};

use futures::stream;
use hearth_transport::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use hearth_transport::device_plugin::v1beta1::registration_server::{
    Registration, RegistrationServer,
};
use hearth_transport::device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, Empty, RegisterRequest,
};
use hearth_transport::tonic::transport::{Channel, Endpoint, Server, Uri};
use hearth_transport::tonic::{Request, Response, Status, async_trait};
use hearth_transport::{DeviceOffer, DeviceOfferError};
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

/// A kubelet that passes on what it is told, or refuses it.
struct Kubelet {
    told: mpsc::UnboundedSender<RegisterRequest>,
    refusal: Option<&'static str>,
}

#[async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        if let Some(refusal) = self.refusal {
            return Err(Status::invalid_argument(refusal));
        }
        self.told.send(request.into_inner()).unwrap();
        Ok(Response::new(Empty {}))
    }
}

/// Starts a kubelet, which removes all sockets first.
fn kubelet(
    directory: &Path,
    refusal: Option<&'static str>,
) -> mpsc::UnboundedReceiver<RegisterRequest> {
    for file in std::fs::read_dir(directory).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    let (told, told_next) = mpsc::unbounded_channel();
    let listener = UnixListener::bind(directory.join("kubelet.sock")).unwrap();
    let connections = stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await;
        Some((accepted.map(|(stream, _)| stream), listener))
    });
    let service = RegistrationServer::new(Kubelet { told, refusal });
    let server = Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(connections));
    told_next
}

async fn connected(socket: PathBuf) -> DevicePluginClient<Channel> {
    let connect = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    DevicePluginClient::new(endpoint.connect_with_connector(connect).await.unwrap())
}

fn offer(directory: &Path) -> DeviceOffer {
    DeviceOffer {
        directory: directory.to_owned(),
        socket: "test.sock".to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        devices: vec!["A".to_owned(), "B".to_owned()],
    }
}

#[tokio::test]
async fn a_kubelet_is_told_of_devices_and_told_again_after_its_restart() {
    let directory = tempfile::tempdir().unwrap();
    let offer = offer(directory.path());
    // A plugin that was killed leaves its socket.
    drop(UnixListener::bind(directory.path().join(&offer.socket)).unwrap());
    for _ in 0..2 {
        let mut told = kubelet(directory.path(), None);
        let serving = tokio::spawn({
            let offer = offer.clone();
            async move { offer.serve().await }
        });
        let request = told.recv().await.unwrap();
        assert_eq!(request.version, "v1beta1");
        assert_eq!(request.resource_name, "nvidia.com/gpu");
        let mut plugin = connected(directory.path().join(request.endpoint)).await;
        let mut lists = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
        let list = lists.message().await.unwrap().unwrap();
        let devices = list.devices.iter();
        let devices: Vec<_> = devices.map(|it| (&*it.id, &*it.health)).collect();
        assert_eq!(devices, [("A", "Healthy"), ("B", "Healthy")]);
        let container = |id: &str| ContainerAllocateRequest {
            devices_ids: vec![id.to_owned()],
        };
        let container_requests = vec![container("A"), container("B")];
        let allocated = plugin.allocate(AllocateRequest { container_requests });
        let allocated = allocated.await.unwrap().into_inner();
        assert_eq!(allocated.container_responses.len(), 2);

        std::fs::remove_file(directory.path().join(&offer.socket)).unwrap();
        assert!(serving.await.unwrap().is_ok());
    }
}

#[tokio::test]
async fn a_kubelet_that_is_away_or_refuses_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let offer = offer(directory.path());
    let error = offer.serve().await.unwrap_err();
    assert!(
        matches!(error, DeviceOfferError::Register { .. }),
        "{error}"
    );
    let told = error.to_string();
    assert!(
        told.contains("kubelet.sock") && told.contains("No such file"),
        "{told}"
    );
    assert!(!directory.path().join(&offer.socket).exists());

    let _told = kubelet(directory.path(), Some("the version is not supported"));
    let told = offer.serve().await.unwrap_err().to_string();
    assert!(
        told.contains("nvidia.com/gpu") && told.contains("the version is not supported"),
        "{told}"
    );

    let nowhere = DeviceOffer {
        directory: directory.path().join("nowhere"),
        ..offer
    };
    let error = nowhere.serve().await.unwrap_err();
    assert!(matches!(error, DeviceOfferError::Listen { .. }), "{error}");
}
