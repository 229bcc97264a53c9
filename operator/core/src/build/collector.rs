//! What the operator's setting for traces adds to Pods, to their digests and to NetworkPolicies.

use std::net::IpAddr;

use hearth_crds::PodTemplateSpec;
use k8s_openapi::api::core::v1::{EnvVar, Pod};
use serde_json::{Value, json};

use super::lines::Lines;
use crate::observed::Tracing;

/// Standard variables of OpenTelemetry.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARGUMENT: &str = "OTEL_TRACES_SAMPLER_ARG";
/// Takes a share of the traces that no client has begun, and a client's as it says itself.
const BY_RATIO: &str = "parentbased_traceidratio";

/// Adds the variables to a Pod's containers, but for those that the deployment's template has.
pub(super) fn add(tracing: Option<&Tracing>, pod: &mut Pod) {
    let Some(tracing) = tracing else { return };
    let ratio = tracing.sample_ratio.to_string();
    let variables = [
        (ENDPOINT, &*tracing.endpoint),
        (SAMPLER, BY_RATIO),
        (SAMPLER_ARGUMENT, &ratio),
    ];
    let containers = pod.spec.iter_mut().flat_map(|spec| &mut spec.containers);
    for container in containers {
        let env = container.env.get_or_insert_default();
        let has = |env: &[EnvVar], name: &str| env.iter().any(|other| other.name == name);
        let has_sampler = has(env, SAMPLER);
        for (name, value) in variables {
            // The argument of another sampler is not ours to give.
            let is_of_other = has_sampler && name == SAMPLER_ARGUMENT;
            if !is_of_other && !has(env, name) {
                env.push(EnvVar {
                    name: name.to_owned(),
                    value: Some(value.to_owned()),
                    ..EnvVar::default()
                });
            }
        }
    }
}

/// Writes the lines of a Pod's digest: a worker learns of a collector as it starts.
pub(super) fn write(tracing: &Tracing, template: &PodTemplateSpec, lines: &mut Lines) {
    let is_own = |name| template.env.iter().any(|own| own.name == name);
    let Tracing {
        endpoint,
        host: _,
        port: _,
        sample_ratio,
    } = tracing;
    if !is_own(ENDPOINT) {
        lines.put("otlp-endpoint", endpoint);
    }
    match (is_own(SAMPLER), is_own(SAMPLER_ARGUMENT)) {
        (false, false) => lines.put("trace-sample-ratio", sample_ratio),
        // The sampler is all that is added.
        (false, true) if is_own(ENDPOINT) => lines.put("trace-sampler", BY_RATIO),
        _ => {}
    }
}

/// Rules of a NetworkPolicy for the way to the collector: to its address, its namespace where its name says it, else to its port
/// anywhere; and to name servers, which may be outside of the cluster, where it has a name.
pub(super) fn egress(tracing: &Tracing) -> Vec<Value> {
    let host = tracing.host.trim_matches(['[', ']']);
    let address: Option<IpAddr> = host.parse().ok();
    let mut rule = json!({"ports": [{"protocol": "TCP", "port": tracing.port}]});
    if let Some(address) = address {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        rule["to"] = json!([{"ipBlock": {"cidr": format!("{address}/{bits}")}}]);
    } else if let Some(namespace) = namespace_of(host) {
        let label = json!({"kubernetes.io/metadata.name": namespace});
        rule["to"] = json!([{"namespaceSelector": {"matchLabels": label}}]);
    }
    let names =
        json!({"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]});
    let names = address.is_none().then_some(names);
    std::iter::once(rule).chain(names).collect()
}

/// The namespace of a Service's name: `collector.monitoring.svc`, with or without the cluster's domain.
fn namespace_of(host: &str) -> Option<&str> {
    let mut parts = host.split('.');
    let (_service, namespace) = (parts.next()?, parts.next()?);
    (parts.next() == Some("svc")).then_some(namespace)
}

#[cfg(test)]
mod tests {
    use hearth_crds::InferenceDeployment;

    use super::*;
    use crate::build::digest_tests::hashes;
    use crate::build::tests::pods_of;
    use crate::build::{Beside, objects};
    use crate::observed::Settings;
    use crate::testing::samples::{context_of, deployment, plan, settings};

    fn traced(host: &str) -> Settings {
        Settings {
            tracing: Some(Tracing {
                endpoint: format!("http://{host}:4318"),
                host: host.to_owned(),
                port: 4318,
                sample_ratio: 0.25,
            }),
            ..settings()
        }
    }

    fn with_env(env: &Value) -> InferenceDeployment {
        let mut deployment = deployment();
        let template = json!({"env": env});
        deployment.spec.pod_template = serde_json::from_value(template).expect("a template");
        deployment
    }

    #[test]
    fn every_rank_is_told_and_the_deployments_own_words_count() {
        let env = |deployment: &InferenceDeployment| {
            let pods = pods_of(&traced("otel.lan"), deployment, &plan());
            let env = |pod: Pod| pod.spec.expect("spec").containers[0].env.clone();
            let all: Vec<_> = pods.into_iter().map(|pod| env(pod.pod)).collect();
            assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
            serde_json::to_value(&all[0]).expect("JSON")
        };
        let usual = json!([
            {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://otel.lan:4318"},
            {"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_traceidratio"},
            {"name": "OTEL_TRACES_SAMPLER_ARG", "value": "0.25"},
        ]);
        assert_eq!(env(&deployment()), usual);
        let mut own = usual.clone();
        own[2]["value"] = json!("1");
        let of_template = json!([own[2]]);
        assert_eq!(
            env(&with_env(&of_template)),
            json!([own[2], usual[0], usual[1]])
        );
    }

    #[test]
    fn pods_are_replaced_where_it_reaches_them() {
        let hashes = |settings: &Settings, deployment: &InferenceDeployment| {
            hashes(settings, deployment, &plan())
        };
        let differ = |a: &[String], b: &[String]| a.iter().zip(b).all(|(a, b)| a != b);
        let plain = deployment();
        let before = hashes(&settings(), &plain);
        let after = hashes(&traced("otel.lan"), &plain);
        assert!(differ(&before, &after));
        assert!(differ(&after, &hashes(&traced("other.lan"), &plain)));
        let own = with_env(&json!([
            {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": ""},
            {"name": "OTEL_TRACES_SAMPLER", "value": "always_off"},
        ]));
        let settings = settings();
        assert_eq!(hashes(&settings, &own), hashes(&traced("otel.lan"), &own));
    }

    /// Whatever the deployment says itself, what is added to its Pods replaces them, and nothing else does.
    #[test]
    fn pods_are_replaced_where_their_variables_change() {
        let mut other = traced("otel.lan");
        other.tracing.as_mut().expect("tracing").sample_ratio = 0.5;
        let all = [settings(), traced("otel.lan"), traced("other.lan"), other];
        let own = [
            json!({"name": ENDPOINT, "value": "http://own.lan:4318"}),
            json!({"name": SAMPLER, "value": "always_on"}),
            json!({"name": SAMPLER_ARGUMENT, "value": "1"}),
        ];
        for set in 0..1_usize << own.len() {
            let own = own.iter().enumerate();
            let own: Vec<&Value> = own
                .filter(|(bit, _)| set >> bit & 1 == 1)
                .map(|(_, variable)| variable)
                .collect();
            let deployment = with_env(&json!(own));
            let env = |settings: &Settings| {
                let pods = pods_of(settings, &deployment, &plan()).into_iter();
                let env = |pod: Pod| pod.spec.expect("spec").containers[0].env.clone();
                pods.map(|pod| env(pod.pod)).collect::<Vec<_>>()
            };
            let digests = |settings: &Settings| hashes(settings, &deployment, &plan());
            for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
                let differ = digests(a) != digests(b);
                assert_eq!(differ, env(a) != env(b), "{own:?}: {a:?} {b:?}");
            }
        }
    }

    #[test]
    fn policies_let_spans_pass_to_the_collector() {
        let egress = |settings: &Settings| {
            let deployment = deployment();
            let context = context_of(settings, &deployment);
            let objects = objects(&context, &plan(), Beside::default());
            let of_policies = objects.into_iter().filter_map(|object| {
                let types = object.types.as_ref()?;
                (types.kind == "NetworkPolicy").then(|| object.data["spec"]["egress"].clone())
            });
            let both: Vec<Value> = of_policies.collect();
            assert_eq!(both.len(), 2);
            both
        };
        let usual = egress(&settings());
        let names =
            json!({"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]});
        let ports = json!([{"protocol": "TCP", "port": 4318}]);
        let block = |cidr: &str| json!({"ports": ports, "to": [{"ipBlock": {"cidr": cidr}}]});
        let namespace = json!({"kubernetes.io/metadata.name": "monitoring"});
        let namespace =
            json!({"ports": ports, "to": [{"namespaceSelector": {"matchLabels": namespace}}]});
        for (host, expected) in [
            ("192.168.1.7", vec![block("192.168.1.7/32")]),
            ("[fd00::7]", vec![block("fd00::7/128")]),
            (
                "otel.monitoring.svc",
                vec![namespace.clone(), names.clone()],
            ),
            (
                "otel.monitoring.svc.cluster.local",
                vec![namespace, names.clone()],
            ),
            ("otel.lan", vec![json!({"ports": ports}), names.clone()]),
        ] {
            for (before, after) in usual.iter().zip(egress(&traced(host))) {
                let (before, after) = (
                    before.as_array().expect("rules"),
                    after.as_array().expect("rules").clone(),
                );
                assert_eq!(after[..before.len()], before[..], "{host}");
                assert_eq!(after[before.len()..], expected[..], "{host}");
            }
        }
    }
}
