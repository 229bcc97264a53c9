//! Validation of a request for a model, before anything is fetched.

use hearth_crds::{HttpFile, HttpSource, files_store_key, hub_store_key, shown_url, store_key};
use hearth_fetch::{Credentials, FetchError, Key, Source};
use hearth_transport::v1::{self, ModelRequest};
use ipnet::IpNet;
use tonic::Status;

/// Returns key and source of a request; no source if it has no URL, no files and no repository. The key must follow from everything needed to open
/// the model: knowing only its checksum does not give access to a stored model.
pub(super) fn checked(request: &ModelRequest) -> Result<(Key, Option<Source>), Status> {
    let key = parsed(&request.key)?;
    if let Some(hub) = &request.hub {
        let source = repository(request, hub, key.clone())?;
        return Ok((key, Some(held(source, request))));
    }
    if !request.files.is_empty() {
        let source = list(request, key.clone())?;
        return Ok((key, Some(held(source, request))));
    }
    if request.url.is_empty() {
        return Ok((key, None));
    }
    let expected = store_key(&request.url, &request.sha256, &request.holder);
    if key.as_str() != expected {
        return Err(Status::invalid_argument(format!(
            "key is {key}, and that of the URL, sha256 {} and holder {:?} is {expected}",
            request.sha256, request.holder
        )));
    }
    let source = Source::new(&request.url, &request.sha256)
        .map_err(|error| Status::invalid_argument(error.to_string()))?
        .kept_as(key.clone());
    Ok((
        key,
        Some(match credentials(request.credentials.as_ref())? {
            Some(credentials) => source.opened_by(credentials),
            None => source,
        }),
    ))
}

/// The source for whoever may have the model, as far as that is certain.
fn held(source: Source, request: &ModelRequest) -> Source {
    match request.holder.is_empty() && !is_for_all(request) {
        true => source,
        false => source.held_by(&request.holder),
    }
}

/// Returns the source of a request for a list of files.
fn list(request: &ModelRequest, key: Key) -> Result<Source, Status> {
    if !request.url.is_empty() {
        return Err(Status::invalid_argument(
            "both a URL and a list of files were given",
        ));
    }
    let file = |file: &v1::HttpFile| HttpFile {
        url: file.url.clone(),
        sha256: file.sha256.clone(),
        path: Some(file.path.clone()),
    };
    let listed = HttpSource {
        files: request.files.iter().map(file).collect(),
        ..HttpSource::default()
    };
    let expected = files_store_key(&listed.files, &request.holder);
    if key.as_str() != expected {
        return Err(Status::invalid_argument(format!(
            "key is {key}, and that of the files and holder {:?} is {expected}",
            request.holder
        )));
    }
    let mut source = Source::of_files(&listed)
        .map_err(|error| Status::invalid_argument(error.to_string()))?
        .kept_as(key);
    if is_for_all(request) {
        source = source.for_all();
    }
    Ok(match credentials(request.credentials.as_ref())? {
        Some(credentials) => source.opened_by(credentials),
        None => source,
    })
}

/// Whether every deployment that names the source may have the model: nothing secret opens it, whatever the holder says.
pub(super) fn is_for_all(request: &ModelRequest) -> bool {
    let files = request.files.iter().map(|file| &file.url);
    let mut urls = files.chain([&request.url]);
    request.holder.is_empty()
        && request.credentials.is_none()
        && urls.all(|url| shown_url(url) == *url)
}

/// Returns the source of a request for a hub's repository.
fn repository(request: &ModelRequest, hub: &v1::HubRepository, key: Key) -> Result<Source, Status> {
    if !request.url.is_empty() || !request.files.is_empty() {
        return Err(Status::invalid_argument(
            "both a URL and a repository of a hub were given",
        ));
    }
    let expected = hub_store_key(&hub.repo, &hub.revision, &request.holder);
    if key.as_str() != expected {
        return Err(Status::invalid_argument(format!(
            "key is {key}, and that of {} at {:?} and holder {:?} is {expected}",
            hub.repo, hub.revision, request.holder
        )));
    }
    let refused = |error: FetchError| Status::invalid_argument(error.to_string());
    let mut source = Source::of_hub(&hub.endpoint, &hub.repo, Some(&hub.revision))
        .map_err(refused)?
        .kept_as(key);
    if !hub.commit.is_empty() {
        source = source.at_commit(&hub.commit).map_err(refused)?;
    }
    Ok(match credentials(request.credentials.as_ref())? {
        Some(credentials) => source.opened_by(credentials),
        None => source,
    })
}

fn credentials(given: Option<&v1::Credentials>) -> Result<Option<Credentials>, Status> {
    let Some(v1::Credentials {
        username,
        password,
        token,
    }) = given
    else {
        return Ok(None);
    };
    match (username.is_empty(), token.is_empty()) {
        (false, true) => Ok(Some(Credentials::Basic {
            username: username.clone(),
            password: password.clone(),
        })),
        (true, false) => Ok(Some(Credentials::Bearer {
            token: token.clone(),
        })),
        _ => Err(Status::invalid_argument(
            "credentials are a token, or a username with its password",
        )),
    }
}

/// Parses address ranges in CIDR notation.
pub(super) fn ranges(texts: &[String]) -> Result<Vec<IpNet>, Status> {
    let range = |text: &String| {
        text.parse().map_err(|_| {
            Status::invalid_argument(format!(
                "{text:?} is not an address range such as 10.42.0.0/16"
            ))
        })
    };
    texts.iter().map(range).collect()
}

/// Parses a key.
pub(super) fn parsed(text: &str) -> Result<Key, Status> {
    Key::parse(text).ok_or_else(|| {
        Status::invalid_argument(format!(
            "key is {text:?}: it must have 32 lower-case hexadecimal digits"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_checked_before_anything_is_fetched() {
        let sha256 = "ab".repeat(32);
        let nas = "http://nas/m.tar";
        let request = |key: &str, url: &str| ModelRequest {
            key: key.to_owned(),
            url: url.to_owned(),
            sha256: sha256.clone(),
            ..ModelRequest::default()
        };
        let key_of = |url: &str, holder: &str| store_key(url, &sha256, holder);
        let public = key_of(nas, "");
        let (key, source) = checked(&request(&public, nas)).unwrap();
        assert_eq!((key.as_str(), &source.unwrap().key()), (&*public, &key));
        assert!(checked(&request(&public, "")).unwrap().1.is_none());
        let file = "file:///etc/passwd";
        for (key, url) in [
            ("../../etc", nas),
            // Only the digest, and the key of another holder.
            (&sha256[..32], nas),
            (&key_of(nas, "other/secret"), nas),
            (&key_of("http://other/m.tar", ""), nas),
            (&key_of(file, ""), file),
        ] {
            let status = checked(&request(key, url)).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        }
    }

    #[test]
    fn a_repository_is_checked_with_who_may_have_it() {
        let request = |key: &str, hub: (&str, &str, &str), commit: &str| {
            let [endpoint, repo, revision] = [hub.0, hub.1, hub.2].map(str::to_owned);
            ModelRequest {
                key: key.to_owned(),
                holder: "one/hub".to_owned(),
                hub: Some(v1::HubRepository {
                    endpoint,
                    repo,
                    revision,
                    commit: commit.to_owned(),
                }),
                ..ModelRequest::default()
            }
        };
        let hub = ("https://hub.lan", "a/b", "main");
        let key = hub_store_key("a/b", "main", "one/hub");
        let (found, source) = checked(&request(&key, hub, "")).unwrap();
        assert_eq!(
            (found.as_str(), source.unwrap().key()),
            (&*key, found.clone())
        );
        assert!(checked(&request(&key, hub, &"c".repeat(40))).is_ok());
        let other = hub_store_key("a/b", "main", "");
        let odd = hub_store_key("../b", "main", "one/hub");
        for (key, hub, commit) in [
            (&other, hub, ""),
            (&key, ("https://hub.lan", "a/b", "v2"), ""),
            (&key, ("ftp://hub.lan", "a/b", "main"), ""),
            (&odd, ("https://hub.lan", "../b", "main"), ""),
            (&key, hub, "main"),
        ] {
            let status = checked(&request(key, hub, commit)).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        }
        let both = ModelRequest {
            url: "http://nas/m.tar".to_owned(),
            ..request(&key, hub, "")
        };
        assert!(checked(&both).is_err());
    }

    /// Files of other models stand for downloads of the same holder, or of what is certainly for everybody.
    #[test]
    fn who_may_share_files_is_known_or_nobody_does() {
        let hub = |holder: &str, token: &str| ModelRequest {
            key: hub_store_key("a/b", "main", holder),
            holder: holder.to_owned(),
            hub: Some(v1::HubRepository {
                endpoint: "https://hub.lan".to_owned(),
                repo: "a/b".to_owned(),
                revision: "main".to_owned(),
                commit: String::new(),
            }),
            credentials: (!token.is_empty()).then(|| v1::Credentials {
                token: token.to_owned(),
                ..v1::Credentials::default()
            }),
            ..ModelRequest::default()
        };
        let url = |url: &str| ModelRequest {
            key: store_key(url, &"ab".repeat(32), ""),
            url: url.to_owned(),
            sha256: "ab".repeat(32),
            ..ModelRequest::default()
        };
        for (request, holder) in [
            (hub("", ""), Some("")),
            (hub("", "hf_secret"), None),
            (hub("one/hub", "hf_secret"), Some("one/hub")),
            (hub("one/hub", ""), Some("one/hub")),
        ] {
            let source = checked(&request).unwrap().1.unwrap();
            assert_eq!(source.holder(), holder, "{request:?}");
        }
        // An archive is no set of files.
        let archive = checked(&url("http://nas/m.tar")).unwrap().1.unwrap();
        assert_eq!(archive.holder(), None);
    }

    fn file(url: &str, path: &str) -> v1::HttpFile {
        v1::HttpFile {
            url: url.to_owned(),
            sha256: "ab".repeat(32),
            path: path.to_owned(),
        }
    }

    fn key_of(files: &[v1::HttpFile], holder: &str) -> String {
        let files = files.iter().map(|file| HttpFile {
            url: file.url.clone(),
            sha256: file.sha256.clone(),
            path: Some(file.path.clone()),
        });
        files_store_key(&files.collect::<Vec<_>>(), holder)
    }

    fn request_of(key: &str, files: &[v1::HttpFile]) -> ModelRequest {
        ModelRequest {
            key: key.to_owned(),
            files: files.to_vec(),
            ..ModelRequest::default()
        }
    }

    #[test]
    fn a_list_is_checked_with_who_may_have_it() {
        let files = [file("http://nas/config.json", "config.json")];
        let key = key_of(&files, "");
        let (found, source) = checked(&request_of(&key, &files)).unwrap();
        assert_eq!((found.as_str(), &source.unwrap().key()), (&*key, &found));
        for odd in [
            file("http://nas/config.json", "../config.json"),
            file("file:///etc/passwd", "config.json"),
        ] {
            let odd = [odd];
            let status = checked(&request_of(&key_of(&odd, ""), &odd)).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        }
        let other = [file("http://mirror/config.json", "config.json")];
        let private = key_of(&files, "one/nas");
        let both = ModelRequest {
            url: "http://nas/m.tar".to_owned(),
            ..request_of(&key, &files)
        };
        for refused in [request_of(&key, &other), request_of(&private, &files), both] {
            assert!(checked(&refused).is_err());
        }
    }

    #[test]
    fn only_a_list_that_nothing_secret_opens_is_for_every_deployment_whatever_the_holder_says() {
        let files = [file("http://nas/config.json", "config.json")];
        let (key, private) = (key_of(&files, ""), key_of(&files, "one/nas"));
        let is_named = |request: &ModelRequest| {
            let source = checked(request).unwrap().1.unwrap();
            assert_eq!(source.is_for_all(), is_for_all(request));
            source.is_for_all()
        };
        assert!(is_named(&request_of(&key, &files)));
        let of_secret = ModelRequest {
            holder: "one/nas".to_owned(),
            ..request_of(&private, &files)
        };
        let opened = ModelRequest {
            credentials: Some(v1::Credentials {
                token: "t".to_owned(),
                ..v1::Credentials::default()
            }),
            ..request_of(&key, &files)
        };
        assert!(!is_named(&of_secret) && !is_named(&opened));
        for url in [
            "http://nas/config.json?sig=1",
            "http://ann:pw@nas/config.json",
        ] {
            let signed = [
                file("http://nas/a.json", "a.json"),
                file(url, "config.json"),
            ];
            for holder in ["", "one/"] {
                let signed = ModelRequest {
                    holder: holder.to_owned(),
                    ..request_of(&key_of(&signed, holder), &signed)
                };
                assert!(!is_named(&signed), "{url} of {holder:?}");
            }
        }
    }

    #[test]
    fn credentials_are_a_token_or_a_user() {
        let given = |username: &str, password: &str, token: &str| {
            let [username, password, token] = [username, password, token].map(str::to_owned);
            credentials(Some(&v1::Credentials {
                username,
                password,
                token,
            }))
        };
        assert!(credentials(None).unwrap().is_none());
        assert!(matches!(
            given("ann", "pw", ""),
            Ok(Some(Credentials::Basic { .. }))
        ));
        assert!(matches!(
            given("ann", "", ""),
            Ok(Some(Credentials::Basic { .. }))
        ));
        assert!(matches!(
            given("", "", "t"),
            Ok(Some(Credentials::Bearer { .. }))
        ));
        for (username, token) in [("ann", "t"), ("", "")] {
            assert!(given(username, "", token).is_err());
        }
        assert!(ranges(&["10.42.0.0/16".to_owned(), "fd42::/48".to_owned()]).is_ok());
        assert!(ranges(&["10.42.0.0".to_owned()]).is_err());
    }
}
