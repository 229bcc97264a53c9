//! CEL rules used in more than one place.

pub(crate) const REPLICAS_XOR_RANGE: &str =
    "!has(self.replicas) || (!has(self.minReplicas) && !has(self.maxReplicas))";
pub(crate) const REPLICAS_XOR_RANGE_SAYS: &str =
    "write replicas alone: minReplicas and maxReplicas are deprecated";
pub(crate) const SCALING_XOR_RANGE: &str =
    "!has(self.scaling) || (!has(self.minReplicas) && !has(self.maxReplicas))";
pub(crate) const SCALING_XOR_RANGE_SAYS: &str =
    "write scaling alone: minReplicas and maxReplicas beside it are deprecated, and belong in it";
/// Rule for the deprecated bounds, which belong in scaling; no value passes.
pub(crate) const NO_RANGE: &str = "self < 0";
pub(crate) const NO_PREFILL_RANGE_SAYS: &str = "bounds are deprecated here: write spec.prefill.replicas: 1 or another number instead; in a cluster, scaling: {mode: Auto, minReplicas, maxReplicas} lets Hearth change it within bounds, and mode External an autoscaler";
pub(crate) const NO_DECODE_RANGE_SAYS: &str = "bounds are deprecated here: write spec.decode.replicas: 1 or another number instead; in a cluster, scaling: {mode: Auto, minReplicas, maxReplicas} lets Hearth change it within bounds, and mode External an autoscaler (manifests/examples/hpa.yaml)";
pub(crate) const MIN_UP_TO_MAX: &str =
    "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas";
pub(crate) const MIN_UP_TO_MAX_SAYS: &str = "write a minReplicas that is not above maxReplicas";
pub(crate) const REPLICAS: &str = "self >= 1 && self <= 64";
pub(crate) const REPLICAS_SAYS: &str = "write 1 to 64 workers; the default is 1";
pub(crate) const OBJECT_NAME: &str = "self.matches('^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$')";
pub(crate) const OBJECT_NAME_SAYS: &str =
    "write the object's name: lower-case letters, digits, '-' and '.', at most 253 of them";
pub(crate) const ABSOLUTE: &str = "self.matches('^/') && !self.matches('(^|/)[.][.](/|$)')";
pub(crate) const QUALIFIED_KEYS: &str = "self.all(k, k.size() <= 317 && k.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))";
pub(crate) const LABEL_KEYS_SAYS: &str = "write label keys such as team or example.com/team: at most 63 letters, digits, '-', '_' and '.' after the prefix";
pub(crate) const PREFIXED_KEYS: &str = "self.all(k, k.size() <= 317 && k.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))";
pub(crate) const PREFIXED_KEYS_SAYS: &str = "write annotation keys with a prefix, such as example.com/team: at most 63 letters, digits, '-', '_' and '.' after it";
/// Rule against prefixes by which Hearth and Kubernetes identify and control Pods, including all subdomains.
pub(crate) const KEYS_OF_OTHERS: &str =
    "self.all(k, !k.matches('^([^/]*[.])?(hearth[.]dev|kubernetes[.]io|k8s[.]io)/'))";
pub(crate) const KEYS_OF_OTHERS_SAYS: &str = "keys of hearth.dev, kubernetes.io and k8s.io are Hearth's and the cluster's own: write one with another prefix";
/// Rule against prefixes by which container runtimes and their plugins take devices, mounts and profiles from a Pod's
/// annotations.
pub(crate) const KEYS_OF_RUNTIMES: &str = "self.all(k, !k.matches('^(io[.]|([^/]*[.])?(nri[.]io|containerd[.]io|crio[.]io|cri-o[.]io)/)'))";
pub(crate) const KEYS_OF_RUNTIMES_SAYS: &str = "annotations of container runtimes could give a Pod devices and mounts that its plan does not count: remove them";
/// Rule against prefixes by which network plugins take networks, addresses and routes from a Pod: they could lead past
/// its NetworkPolicies.
pub(crate) const KEYS_OF_NETWORKS: &str = "self.all(k, !k.matches('^([^/]*[.])?(cni[.]cncf[.]io|multus-cni[.]io|projectcalico[.]org|ovn[.]org|antrea[.]io|cilium[.]io|networking[.]gke[.]io|vpc[.]amazonaws[.]com)/'))";
pub(crate) const KEYS_OF_NETWORKS_SAYS: &str =
    "keys of network plugins could move a Pod past Hearth's NetworkPolicies: remove them";
/// Rule against prefixes by which admission webhooks add containers and volumes to a Pod, except keys that opt out.
pub(crate) const KEYS_OF_INJECTORS: &str = "self.all(k, !k.matches('^([^/]*[.])?(istio[.]io|linkerd[.]io|hashicorp[.]com|opentelemetry[.]io|dapr[.]io|kuma[.]io)/') || k + '=' + self[k] in ['sidecar.istio.io/inject=false', 'istio.io/dataplane-mode=none', 'linkerd.io/inject=disabled', 'consul.hashicorp.com/connect-inject=false', 'kuma.io/sidecar-injection=disabled', 'sidecar.opentelemetry.io/inject=false'])";
pub(crate) const KEYS_OF_INJECTORS_SAYS: &str = "keys of sidecar injectors could give a Pod containers that its plan does not count: remove them; of these only the ones that turn injection off are accepted, such as sidecar.istio.io/inject: \"false\"";
/// Rule against variables that Hearth, the loader, TLS libraries, GPU drivers or the runtime obey: one of them could
/// make a process load other code, or see GPUs that its plan does not give it.
pub(crate) const OPEN_VARIABLE: &str = "!self.matches('^(HEARTH_|LD_|GLIBC_|GCONV_|SSL_CERT_|CUDA_|NVIDIA_|NVRTC_|KUBERNETES_)') && !(self in ['PATH', 'HOME', 'HOSTNAME', 'LOCPATH'])";
pub(crate) const OPEN_VARIABLE_SAYS: &str = "PATH, HOME, HOSTNAME, LOCPATH and names that begin with HEARTH_, LD_, GLIBC_, GCONV_, SSL_CERT_, CUDA_, NVIDIA_, NVRTC_ or KUBERNETES_ are set by Hearth or steer the loader and the GPU driver: write another name";
pub(crate) const ANNOTATION_KEYS_SAYS: &str = "write annotation keys such as external-dns.alpha.kubernetes.io/hostname: at most 63 letters, digits, '-', '_' and '.' after the prefix";
/// Rule against keys that no user may set on any object.
pub(crate) const KEYS_OF_HEARTH: &str =
    "self.all(k, !k.matches('^(([^/]*[.])?hearth[.]dev|kubectl[.]kubernetes[.]io)/'))";
pub(crate) const KEYS_OF_HEARTH_SAYS: &str = "keys of hearth.dev and kubectl.kubernetes.io are written by Hearth and kubectl: write one with another prefix";
/// Rule for a field that has no valid value yet.
pub(crate) const NEVER: &str = "false";
/// Rule for a list that may have no items yet.
pub(crate) const NO_ITEMS: &str = "self.size() == 0";
/// The models that come with Hearth.
pub(crate) const BUILTIN_NAME: &str = "self == 'hearth-demo'";
pub(crate) const BUILTIN_NAME_SAYS: &str = "the models that come with Hearth are: hearth-demo";
/// Rule for what is behind a URL.
pub(crate) const ARCHIVE_XOR_FILES: &str = "has(self.files) ? self.files.size() > 0 && !has(self.url) && !has(self.sha256) : has(self.url) && has(self.sha256)";
pub(crate) const ARCHIVE_XOR_FILES_SAYS: &str =
    "write url and sha256 of an archive, or files: [{url, sha256}] with all files of the model";
pub(crate) const SHA256: &str = "self.matches('^[0-9a-f]{64}$')";
pub(crate) const SHA256_SAYS: &str =
    "write the 64 lower-case hexadecimal digits that sha256sum prints";
/// Rules for the URL of one of many files. The API server counts each one's cost for every file that there may be, so that there
/// are two; what they do not see, [`crate::unsupported`] does.
pub(crate) const FILE_URL: &str = "(self.startsWith('http://') || self.startsWith('https://')) && isURL(self) && url(self).getHostname() != ''";
pub(crate) const FILE_URL_HAS_NO_SPACE: &str = "!self.contains(' ')";
pub(crate) const FILE_URL_SAYS: &str = "write a URL such as https://nas.lan/qwen3/config.json or http://nas.lan:8080/qwen3/config.json, without spaces and control characters";
/// Rule for the URL of an archive.
pub(crate) const ARCHIVE_URL: &str = "self.matches('^https?://[^/ ]+/[^ ]+$') && isURL(self)";
pub(crate) const ARCHIVE_URL_SAYS: &str = "write a URL such as https://nas.lan/models/qwen3.tar or http://nas.lan:8080/models/qwen3.tar, without spaces and control characters";
/// Rule for the path of a model's file; what it does not forbid may still be no file that is needed.
pub(crate) const FILE_PATH: &str =
    "self.matches('^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$')";
pub(crate) const FILE_PATH_SAYS: &str =
    "write a path such as config.json, of letters, digits and ._-";
pub(crate) const NATIVE_WEIGHTS: &str = "self == 'Native'";
pub(crate) const NATIVE_WEIGHTS_SAYS: &str = "this engine runs weights as the checkpoint has them: write Native, and choose a checkpoint in FP8 for less memory";
pub(crate) const NO_ADAPTERS_SAYS: &str =
    "this engine does not run LoRA adapters: remove them, or merge them into the checkpoint";
pub(crate) const NOT_INTERLEAVED: &str = "self in ['Auto', 'Hybrid', 'PipedRing']";
/// Rule for the GPUs of one group of peers.
pub(crate) const PEERS_NUMBER: &str = "!has(self.mode) || self.mode != 'DistributedStreamLoading' || !has(self.gpusPerWorker) || (self.gpusPerWorker >= 2 && self.gpusPerWorker <= 8)";
pub(crate) const PEERS_NUMBER_SAYS: &str = "with mode DistributedStreamLoading gpusPerWorker is the number of GPUs that read a prompt together: write 2 to 8, or remove it";
/// Rule for one group of peers.
pub(crate) const PEERS_ONE_GROUP: &str = "!has(self.mode) || self.mode != 'DistributedStreamLoading' || !has(self.replicas) || self.replicas == 1";
pub(crate) const PEERS_ONE_GROUP_SAYS: &str = "with mode DistributedStreamLoading all prefill workers read one prompt together: write replicas: 1 or remove it, and set the number of GPUs by gpusPerWorker";
/// Rule against another number of peers.
pub(crate) const PEERS_NOT_SCALED: &str = "!has(self.mode) || self.mode != 'DistributedStreamLoading' || !has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode == 'Static'";
pub(crate) const PEERS_NOT_SCALED_SAYS: &str = "with mode DistributedStreamLoading all prefill workers read one prompt together, and none can be added by itself: remove scaling, or write mode: StreamLoading";
/// Rule for a time that only the planner's own choice of peers waits for.
pub(crate) const QUIET_WINDOW_HAS_EFFECT: &str = "!has(self.quietWindow) || !has(self.mode) || self.mode in ['Auto', 'DistributedStreamLoading']";
pub(crate) const QUIET_WINDOW_HAS_EFFECT_SAYS: &str = "quietWindow says when several GPUs read a prompt together, and with this mode they never do: remove quietWindow, or write mode: Auto or DistributedStreamLoading";
/// Rule for a duration of up to a day. What is none has a rule of its own, and CEL can add up no number of any length.
pub(crate) const QUIET_WINDOW: &str = "!self.matches('^([0-9.]+(ms|s|m|h))+$') || (self.matches('^([0-9]{1,8}([.][0-9]{1,9})?(ms|s)|[0-9]{1,5}([.][0-9]{1,9})?(m|h))+$') && duration(self) <= duration('24h'))";
pub(crate) const QUIET_WINDOW_SAYS: &str =
    "write 0s to 24h; the default is 5m with mode Auto and 0s with DistributedStreamLoading";
/// Rule against streaming onto a GPU that no worker may use.
pub(crate) const STREAMING_HAS_GPU: &str = "!has(self.mode) || self.mode != 'StreamLoading' || !has(self.gpusPerWorker) || self.gpusPerWorker > 0";
pub(crate) const STREAMING_HAS_GPU_SAYS: &str = "StreamLoading loads experts onto a GPU and gpusPerWorker is 0: remove gpusPerWorker, or write mode: Auto";
/// Rule for two half batches of at least one stream each.
pub(crate) const DUAL_BATCH_HAS_TWO: &str =
    "!has(self.dualBatch) || self.dualBatch != 'On' || !has(self.maxBatch) || self.maxBatch >= 2";
pub(crate) const DUAL_BATCH_HAS_TWO_SAYS: &str = "dualBatch On halves a batch of at least 2 streams: raise maxBatch to 2 or more, or write dualBatch: \"Off\"";
pub(crate) const KV_TYPES: &str = "self in ['BF16', 'F32']";
pub(crate) const NO_SPILL_SAYS: &str = "this engine keeps the KV cache in memory: remove spill, and lower contextLength or maxBatch if memory is short";
pub(crate) const NO_STABILIZATION_SAYS: &str = "pools with scaling.mode Auto shrink once fewer workers have sufficed for as long as one takes to start, 1 to 5 minutes: remove scaleDownStabilization";
/// Rule against prefill workers that end without the decode workers.
pub(crate) const PREFILL_ZERO: &str = "!has(self.prefill) || !has(self.prefill.scaling) || !has(self.prefill.scaling.minReplicas) || self.prefill.scaling.minReplicas > 0 || !has(self.prefill.scaling.mode) || self.prefill.scaling.mode != 'Auto' || (has(self.decode) && has(self.decode.scaling) && has(self.decode.scaling.minReplicas) && self.decode.scaling.minReplicas == 0)";
pub(crate) const PREFILL_ZERO_SAYS: &str = "prefill workers end for want of requests together with the decode workers: write decode.scaling: {mode: Auto, minReplicas: 0} too, or 1 here";
/// Rule against prefill workers that an autoscaler ends without the decode workers.
pub(crate) const PREFILL_NOT_EMPTIED: &str = "!has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode != 'External' || !has(self.scaling.minReplicas) || self.scaling.minReplicas > 0";
pub(crate) const PREFILL_NOT_EMPTIED_SAYS: &str = "prefill workers end together with the decode workers, whose number 0 ends all: write 1 to 64 workers here, and decode.scaling: {mode: External, minReplicas: 0}";
/// Rules for the number of decode workers, which an autoscaler may set to none.
pub(crate) const REPLICAS_OR_NONE: &str = "self >= 0 && self <= 64";
pub(crate) const NONE_IS_EXTERNAL: &str = "!has(self.replicas) || self.replicas > 0 || (has(self.scaling) && has(self.scaling.mode) && self.scaling.mode == 'External' && has(self.scaling.minReplicas) && self.scaling.minReplicas == 0)";
pub(crate) const NONE_IS_EXTERNAL_SAYS: &str = "write 1 to 64 workers; the default is 1, and 0 takes scaling: {mode: External, minReplicas: 0}, with which an autoscaler ends all workers and starts them again";
/// Rule against a time that nothing waits for.
pub(crate) const STAYS_OR_ENDS: &str = "!has(self.scaleToZeroAfter) || !((has(self.keep) && self.keep) || (has(self.preload) && self.preload))";
pub(crate) const STAYS_OR_ENDS_SAYS: &str = "with autoscaling.keep or autoscaling.preload workers stay without requests: remove scaleToZeroAfter, or remove keep and preload";
/// Rules for durations within bounds; what is none has a rule of its own.
pub(crate) const IDLE_TIME: &str = "!self.matches('^([0-9.]+(ms|s|m|h))+$') || (self.matches('^([0-9]{1,8}([.][0-9]{1,9})?(ms|s)|[0-9]{1,5}([.][0-9]{1,9})?(m|h))+$') && duration(self) >= duration('10s') && duration(self) <= duration('720h'))";
pub(crate) const IDLE_TIME_SAYS: &str = "write 10s to 720h; the default is 10m";
pub(crate) const HOLD_TIME: &str = "!self.matches('^([0-9.]+(ms|s|m|h))+$') || (self.matches('^([0-9]{1,8}([.][0-9]{1,9})?(ms|s)|[0-9]{1,5}([.][0-9]{1,9})?(m|h))+$') && duration(self) >= duration('1s') && duration(self) <= duration('24h'))";
pub(crate) const HOLD_TIME_SAYS: &str = "write 1s to 24h; the default is 10m";
pub(crate) const NO_ROUTES_SAYS: &str =
    "this engine does not attach routes to a Gateway: remove it and use the endpoint directly";
