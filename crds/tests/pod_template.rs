//! Accepted and refused contents of the Pod template and the Service's annotations.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use hearth_crds::{ParseError, Target, parse_deployment, parse_deployment_for};

fn deployment(spec: &str) -> String {
    format!(
        "apiVersion: hearth.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {{name: demo}}\nspec:\n  model: {{source: {{builtin: {{name: hearth-demo}}}}}}\n{spec}"
    )
}

#[track_caller]
fn refused(spec: &str, field: &str, words: &str) {
    let error = parse_deployment(&deployment(spec)).expect_err(spec);
    let found = error.fields().iter().any(|fault| {
        let text = fault.to_string();
        fault.field == field && text.contains(words)
    });
    assert!(found, "{spec}: {error}");
}

const WHOLE: &str = r#"
  podTemplate:
    labels: {team: search, example.com/cost-centre: "42", empty: ""}
    annotations: {prometheus.io/scrape: "true", sidecar.istio.io/inject: "false"}
    env: [{name: RUST_LOG, value: "hearth=debug"}, {name: _EMPTY}]
    caBundles: [{configMap: house, key: ca.crt}, {secret: lab.ca, key: root.pem}]
    runtimeClassName: nvidia
    priorityClassName: batch
    resourceClaims: [{name: nic, resourceClaimName: shared}, {name: nvme, resourceClaimTemplateName: own}]
  endpoint:
    annotations: {external-dns.alpha.kubernetes.io/hostname: llm.example.com, metallb.io/address-pool: a}
"#;

#[test]
fn a_whole_template_is_accepted_in_a_cluster_and_refused_member_by_member_on_a_machine() {
    let text = deployment(WHOLE);
    let spec = parse_deployment_for(&text, Target::Cluster).unwrap().spec;
    assert_eq!(spec.pod_template.env[1].value, "");
    assert_eq!(spec.pod_template.ca_bundles.len(), 2);
    let fields: Vec<String> = match parse_deployment_for(&text, Target::Machine) {
        Err(ParseError::Fields(fields)) => fields.into_iter().map(|field| field.field).collect(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        fields,
        [
            "spec.endpoint.annotations",
            "spec.podTemplate.labels",
            "spec.podTemplate.annotations",
            "spec.podTemplate.env",
            "spec.podTemplate.caBundles",
            "spec.podTemplate.resourceClaims",
            "spec.podTemplate.runtimeClassName",
            "spec.podTemplate.priorityClassName",
        ]
    );
}

#[test]
fn keys_of_hearth_kubernetes_and_runtimes_are_refused() {
    for key in [
        "hearth.dev/role",
        "x.hearth.dev/role",
        "kubernetes.io/os",
        "app.kubernetes.io/name",
        "pod-security.kubernetes.io/enforce",
        "k8s.io/x",
        "cdi.k8s.io/device",
    ] {
        for map in ["labels", "annotations"] {
            refused(
                &format!("  podTemplate: {{{map}: {{{key}: x}}}}"),
                &format!("spec.podTemplate.{map}"),
                "Hearth's and the cluster's own",
            );
        }
    }
    for key in [
        "devices.nri.io/container.gateway",
        "ulimits.nri.containerd.io/container.x",
        "seccomp-profile.kubernetes.cri-o.io/pod",
        "io.example/x",
    ] {
        refused(
            &format!("  podTemplate: {{annotations: {{{key}: x}}}}"),
            "spec.podTemplate.annotations",
            "container runtimes",
        );
    }
    // Runtimes read keys without a prefix.
    for key in ["io.kubernetes.cri-o.Devices", "run.oci.handler", "plain"] {
        refused(
            &format!("  podTemplate: {{annotations: {{{key}: x}}}}"),
            "spec.podTemplate.annotations",
            "with a prefix",
        );
    }
    for key in [
        "hearth.dev/x",
        "kubectl.kubernetes.io/last-applied-configuration",
    ] {
        refused(
            &format!("  endpoint: {{annotations: {{{key}: x}}}}"),
            "spec.endpoint.annotations",
            "written by Hearth and kubectl",
        );
    }
    for near in ["myhearth.dev/x", "notk8s.io/x", "hearth.dev.example.com/x"] {
        let text = deployment(&format!("  podTemplate: {{annotations: {{{near}: x}}}}"));
        parse_deployment(&text).unwrap();
    }
}

#[test]
fn keys_of_network_plugins_and_sidecar_injectors_are_refused() {
    let networks = [
        "k8s.v1.cni.cncf.io/networks",
        "v1.multus-cni.io/default-network",
        "cni.projectcalico.org/ipAddrs",
        "k8s.ovn.org/routing-namespaces",
        "ipam.antrea.io/ippools",
        "policy.cilium.io/no-track-port",
        "cilium.io/x",
        "networking.gke.io/interfaces",
        "vpc.amazonaws.com/pod-eni",
    ];
    let injectors = [
        "sidecar.istio.io/inject",
        "istio.io/rev",
        "linkerd.io/inject",
        "config.linkerd.io/proxy-image",
        "vault.hashicorp.com/agent-inject",
        "consul.hashicorp.com/connect-inject",
        "sidecar.opentelemetry.io/inject",
        "instrumentation.opentelemetry.io/inject-sdk",
        "dapr.io/enabled",
        "kuma.io/sidecar-injection",
    ];
    let networks = networks.map(|key| (key, "past Hearth's NetworkPolicies"));
    let injectors = injectors.map(|key| (key, "sidecar injectors"));
    for (key, words) in networks.into_iter().chain(injectors) {
        for map in ["labels", "annotations"] {
            refused(
                &format!("  podTemplate: {{{map}: {{{key}: \"true\"}}}}"),
                &format!("spec.podTemplate.{map}"),
                words,
            );
        }
    }
    // What turns injection off takes nothing; a word that another key goes by may turn it on.
    for off in [
        "sidecar.istio.io/inject: \"false\"",
        "istio.io/dataplane-mode: none",
        "linkerd.io/inject: disabled",
        "consul.hashicorp.com/connect-inject: \"false\"",
        "kuma.io/sidecar-injection: disabled",
        "sidecar.opentelemetry.io/inject: \"false\"",
    ] {
        for map in ["labels", "annotations"] {
            let text = deployment(&format!("  podTemplate: {{{map}: {{{off}}}}}"));
            parse_deployment(&text).unwrap();
        }
    }
    refused(
        "  podTemplate: {annotations: {sidecar.opentelemetry.io/inject: disabled}}",
        "spec.podTemplate.annotations",
        "sidecar injectors",
    );
    for near in ["notistio.io/x", "cncf.io/x", "cilium.io.example.com/x"] {
        let text = deployment(&format!("  podTemplate: {{labels: {{{near}: x}}}}"));
        parse_deployment(&text).unwrap();
    }
}

#[test]
fn variables_that_steer_a_process_are_refused() {
    for name in [
        "PATH",
        "HOME",
        "LD_PRELOAD",
        "HEARTH_ANYTHING",
        "SSL_CERT_FILE",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "GLIBC_TUNABLES",
        "KUBERNETES_SERVICE_HOST",
    ] {
        refused(
            &format!("  podTemplate: {{env: [{{name: {name}, value: x}}]}}"),
            "spec.podTemplate.env[0].name",
            "write another name",
        );
    }
    for name in ["1A", "A-B", "A=B"] {
        refused(
            &format!("  podTemplate: {{env: [{{name: \"{name}\", value: x}}]}}"),
            "spec.podTemplate.env[0].name",
            "does not begin with a digit",
        );
    }
}

#[test]
fn members_are_bounded() {
    let long = "x".repeat(64);
    refused(
        &format!("  podTemplate: {{labels: {{team: {long}}}}}"),
        "spec.podTemplate.labels.team",
        "63",
    );
    refused(
        &format!("  podTemplate: {{labels: {{{long}: a}}}}"),
        "spec.podTemplate.labels",
        "63",
    );
    refused(
        "  podTemplate: {labels: {a: \"b c\"}}",
        "spec.podTemplate.labels",
        "letters, digits",
    );
    let many: Vec<String> = (0..17).map(|n| format!("l{n}: x")).collect();
    refused(
        &format!("  podTemplate: {{labels: {{{}}}}}", many.join(", ")),
        "spec.podTemplate.labels",
        "16",
    );
    refused(
        "  podTemplate: {priorityClassName: system-node-critical}",
        "spec.podTemplate.priorityClassName",
        "the cluster's own",
    );
    refused(
        "  podTemplate: {resourceClaims: [{name: gpus, resourceClaimName: a}]}",
        "spec.podTemplate.resourceClaims[0].name",
        "Hearth's own claim",
    );
    refused(
        "  podTemplate: {resourceClaims: [{name: nic}]}",
        "spec.podTemplate.resourceClaims[0]",
        "exactly one of resourceClaimName, resourceClaimTemplateName",
    );
    refused(
        "  podTemplate: {caBundles: [{configMap: a, secret: b, key: c}]}",
        "spec.podTemplate.caBundles[0]",
        "exactly one of configMap, secret",
    );
    refused(
        "  podTemplate: {caBundles: [{configMap: a, key: ../x}]}",
        "spec.podTemplate.caBundles[0].key",
        "write a key",
    );
}

#[test]
fn the_deprecated_runtime_class_is_translated_and_never_beside_the_new_one() {
    let old = parse_deployment(&deployment("  placement: {runtimeClassName: nvidia}")).unwrap();
    let new = parse_deployment(&deployment("  podTemplate: {runtimeClassName: nvidia}")).unwrap();
    assert_eq!(old.spec, new.spec);
    refused(
        "  podTemplate: {runtimeClassName: nvidia}\n  placement: {runtimeClassName: nvidia}",
        "spec.placement.runtimeClassName",
        "write podTemplate.runtimeClassName alone",
    );
    let on_machine = parse_deployment_for(
        &deployment("  placement: {runtimeClassName: nvidia}"),
        Target::Machine,
    );
    assert!(
        on_machine
            .unwrap_err()
            .to_string()
            .contains("spec.placement.runtimeClassName")
    );
}

#[test]
fn hearth_up_refuses_to_be_suspended() {
    let text = deployment("  suspend: true");
    assert!(
        parse_deployment_for(&text, Target::Cluster)
            .unwrap()
            .spec
            .suspend
    );
    let refusal = parse_deployment_for(&text, Target::Machine).unwrap_err();
    assert!(
        refusal.to_string().starts_with("spec.suspend is true\n"),
        "{refusal}"
    );
    let text = deployment("  suspend: false");
    assert!(
        !parse_deployment_for(&text, Target::Machine)
            .unwrap()
            .spec
            .suspend
    );
}

#[test]
fn gateways_are_counted_and_one_machine_has_one() {
    let count = |spec: &str| {
        parse_deployment(&deployment(spec))
            .unwrap()
            .spec
            .gateway
            .replicas
    };
    assert_eq!(count(""), 1);
    assert_eq!(count("  gateway: {}"), 1);
    assert_eq!(count("  gateway: {replicas: 8}"), 8);
    for replicas in [0, 9] {
        refused(
            &format!("  gateway: {{replicas: {replicas}}}"),
            "spec.gateway.replicas",
            "write 1 to 8 gateways",
        );
    }
    let of_machine = |spec: &str| parse_deployment_for(&deployment(spec), Target::Machine);
    let refusal = of_machine("  gateway: {replicas: 2}")
        .unwrap_err()
        .to_string();
    assert_eq!(
        refusal,
        "spec.gateway.replicas is 2\n  one machine has one gateway: write 1, or remove it"
    );
    of_machine("  gateway: {replicas: 1}").unwrap();
}
