//! Secrets that open URLs: read for one call, and never stored.

use hearth_transport::v1::Credentials;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::Api;

/// Types of Secrets that people create; others hold data of the cluster itself, such as its tokens.
const TYPES: [&str; 2] = ["Opaque", "kubernetes.io/basic-auth"];

/// The field that names a Secret, and what it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SecretField {
    name: &'static str,
    takes_user: bool,
}

/// What opens a URL: a token, or a user with a password.
pub(super) const URL_SECRET: SecretField = SecretField {
    name: "spec.model.source.http.secretRef",
    takes_user: true,
};
/// What opens a repository of a hub: a token.
pub(super) const HUB_SECRET: SecretField = SecretField {
    name: "spec.model.source.huggingFace.tokenSecretRef",
    takes_user: false,
};

/// Reads the credentials for a source from a Secret.
///
/// # Errors
/// The reason that it is unavailable, with the remedy; never with its contents.
pub(super) async fn credentials(
    client: &Client,
    namespace: &str,
    name: &str,
    field: SecretField,
) -> Result<Credentials, String> {
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    match api.get_opt(name).await {
        Ok(Some(secret)) => read(&secret, namespace, name, field),
        Ok(None) => Err(format!(
            "Secret {namespace}/{name} of {} is not there\n  kubectl -n {namespace} create secret generic {name} --from-literal=token=…",
            field.name
        )),
        Err(error) => Err(format!("Secret {namespace}/{name}: {error}")),
    }
}

fn read(
    secret: &Secret,
    namespace: &str,
    name: &str,
    field: SecretField,
) -> Result<Credentials, String> {
    let type_ = secret.type_.as_deref().unwrap_or("Opaque");
    if !TYPES.contains(&type_) {
        return Err(format!(
            "Secret {namespace}/{name} has type {type_:?}\n  {} takes {}",
            field.name,
            TYPES.join(" or ")
        ));
    }
    let text = |key: &str| {
        let bytes = secret.data.as_ref()?.get(key)?;
        let text = String::from_utf8(bytes.0.clone()).ok()?;
        // A Secret created from a file contains the file's trailing newline.
        Some(text.trim_end_matches(['\r', '\n']).to_owned()).filter(|text| !text.is_empty())
    };
    match (text("token"), text("username"), text("password")) {
        (Some(token), None, _) => Ok(Credentials {
            token,
            ..Credentials::default()
        }),
        (None, Some(username), password) if field.takes_user => Ok(Credentials {
            username,
            password: password.unwrap_or_default(),
            ..Credentials::default()
        }),
        _ if !field.takes_user => Err(format!(
            "Secret {namespace}/{name} holds no token\n  give it the key token, and no username"
        )),
        _ => Err(format!(
            "Secret {namespace}/{name} does not say how to open the URL\n  give it either the key token, or username and password"
        )),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    fn secret(type_: Option<&str>, pairs: &[(&str, &str)]) -> Secret {
        let data = pairs.iter().map(|(key, value)| {
            let bytes = ByteString(value.as_bytes().to_vec());
            ((*key).to_owned(), bytes)
        });
        Secret {
            type_: type_.map(str::to_owned),
            data: Some(data.collect()),
            ..Secret::default()
        }
    }

    #[test]
    fn a_token_or_a_user_opens_a_url() {
        let of = |secret: &Secret| read(secret, "default", "nas", URL_SECRET);
        let of_hub = |secret: &Secret| read(secret, "default", "nas", HUB_SECRET);
        let token = of(&secret(None, &[("token", "t0ken\n")])).unwrap();
        assert_eq!((&*token.token, &*token.username), ("t0ken", ""));
        assert_eq!(of_hub(&secret(None, &[("token", "t0ken")])).unwrap(), token);
        let user = secret(
            Some("kubernetes.io/basic-auth"),
            &[("username", "ann"), ("password", "pw")],
        );
        let user = of(&user).unwrap();
        assert_eq!((&*user.username, &*user.password), ("ann", "pw"));
        let error = of_hub(&secret(None, &[("username", "ann"), ("password", "pw")]));
        assert!(error.unwrap_err().contains("key token"));
        for pairs in [
            &[][..],
            &[("password", "pw")],
            &[("token", "pw"), ("username", "ann")],
            &[("token", "\n")],
        ] {
            let error = of(&secret(Some("Opaque"), pairs)).unwrap_err();
            assert!(
                error.contains("default/nas") && !error.contains("pw"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_the_cluster_made_for_itself_is_not_sent_anywhere() {
        for type_ in [
            "kubernetes.io/service-account-token",
            "kubernetes.io/tls",
            "bootstrap.kubernetes.io/token",
        ] {
            let secret = secret(Some(type_), &[("token", "pw")]);
            let error = read(&secret, "a", "b", URL_SECRET).unwrap_err();
            assert!(error.contains(type_) && !error.contains("pw"), "{error}");
        }
    }
}
