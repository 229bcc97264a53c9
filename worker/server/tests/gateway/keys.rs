//! API keys in a directory that is mounted as a Secret is: links into a version that is swapped as a whole.

use std::os::unix::fs::symlink;
use std::path::Path;

use hearth_server::{Gateway, GatewayConfig};

use crate::support::{FakeWorker, MODEL, Running, eventually, gateway, model_dir};

/// Puts the next version of a mounted Secret in place.
fn mount(directory: &Path, version: &str, files: &[(&str, &str)]) {
    let data = directory.join(version);
    std::fs::create_dir(&data).unwrap();
    for (name, text) in files {
        std::fs::write(data.join(name), text).unwrap();
        let link = directory.join(name);
        if !link.exists() {
            symlink(Path::new("..data").join(name), link).unwrap();
        }
    }
    symlink(version, directory.join("..data_tmp")).unwrap();
    std::fs::rename(directory.join("..data_tmp"), directory.join("..data")).unwrap();
}

async fn status(gateway: &Running, key: &str) -> u16 {
    let request = gateway.http.get(format!("{}/v1/models", gateway.url));
    let response = request.bearer_auth(key).send().await.unwrap();
    response.status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_a_mounted_secret_follow_its_versions() {
    let dir = tempfile::tempdir().unwrap();
    let (ann, all) = ("ann-1\n# her old one\nann-0\n", "all\n");
    mount(dir.path(), "..1", &[("ann", ann), ("team", all)]);
    std::fs::write(dir.path().join(".hidden"), "secret\n").unwrap();
    std::fs::create_dir(dir.path().join("lost+found")).unwrap();
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.api_keys = Some(dir.path().to_owned())
    })
    .await;
    for key in ["ann-1", "ann-0", "all"] {
        assert_eq!(status(&gateway, key).await, 200, "{key}");
    }
    for key in ["secret", "# her old one", "bob"] {
        assert_eq!(status(&gateway, key).await, 401, "{key}");
    }
    mount(dir.path(), "..2", &[("ann", "ann-2\n"), ("bob", "bob\n")]);
    // A file that is missing in the new version is a dangling link until the kubelet removes it, and changes nothing.
    assert!(!dir.path().join("team").exists());
    tokio::time::sleep(std::time::Duration::from_millis(2_500)).await;
    assert_eq!(status(&gateway, "ann-1").await, 200);
    std::fs::remove_file(dir.path().join("team")).unwrap();
    eventually(|| async { status(&gateway, "bob").await == 200 }).await;
    assert_eq!(status(&gateway, "ann-2").await, 200);
    for key in ["ann-1", "ann-0", "all"] {
        assert_eq!(status(&gateway, key).await, 401, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_without_a_key_is_told() {
    let model = model_dir();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(".hidden"), "secret\n").unwrap();
    let worker = FakeWorker::dormant();
    let mut config = GatewayConfig::new(MODEL, model.path(), vec![worker.endpoint()]);
    config.api_keys = Some(dir.path().to_owned());
    let error = Gateway::start(config).err().unwrap().to_string();
    assert!(error.contains("holds no API key"), "{error}");
}
