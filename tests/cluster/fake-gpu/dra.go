// A driver of dynamic resource allocation for the same GPUs: it publishes them as a ResourceSlice of the node and prepares
// the claims that the scheduler gave devices to. Names and attributes are those of NVIDIA's driver. A container with a
// claim gets /dev/null as /dev/nvidiaN and, because the real driver names a GPU by its device node alone, the UUID in
// GPU_DEVICE_N.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	driverName = "gpu.nvidia.com"
	// The kubelet finds drivers by their sockets here.
	registry = "/var/lib/kubelet/plugins_registry"
	cdiFiles = "/var/run/cdi"
	cdiKind  = "k8s.gpu.nvidia.com/claim"
	api      = "/apis/resource.k8s.io/v1"
)

type object = map[string]any

type driver struct {
	registration.UnimplementedRegistrationServer
	dra.UnimplementedDRAPluginServer
	node   string
	uuids  []string
	socket string
	server apiServer
}

// serveDra serves the kubelet until the process ends.
func serveDra(node, kubeconfig string, uuids []string) error {
	server, err := newAPIServer(kubeconfig)
	if err != nil {
		return err
	}
	d := &driver{node: node, uuids: uuids, socket: filepath.Join(registry, driverName+"-reg.sock"), server: server}
	for _, directory := range []string{registry, cdiFiles} {
		if err := os.MkdirAll(directory, 0o755); err != nil {
			return err
		}
	}
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		return err
	}
	services := grpc.NewServer()
	registration.RegisterRegistrationServer(services, d)
	dra.RegisterDRAPluginServer(services, d)
	return services.Serve(listener)
}

func (d *driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.DRAPlugin,
		Name:              driverName,
		Endpoint:          d.socket,
		SupportedVersions: []string{dra.DRAPluginService},
	}, nil
}

// NotifyRegistrationStatus publishes the devices: a kubelet that starts deletes what was published of its node before.
func (d *driver) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Print("not registered: ", status.Error)
		return &registration.RegistrationStatusResponse{}, nil
	}
	go func() {
		for {
			err := d.publish()
			if err == nil {
				log.Print("published ", len(d.uuids), " of ", driverName)
				return
			}
			log.Print(err)
			time.Sleep(500 * time.Millisecond)
		}
	}()
	return &registration.RegistrationStatusResponse{}, nil
}

func (d *driver) publish() error {
	var node struct{ Metadata struct{ UID string } }
	if err := d.server.call("GET", "/api/v1/nodes/"+d.node, nil, &node); err != nil {
		return err
	}
	devices := []object{}
	for i, uuid := range d.uuids {
		devices = append(devices, object{
			"name": fmt.Sprintf("gpu-%d", i),
			"attributes": object{
				"type":                  object{"string": "gpu"},
				"uuid":                  object{"string": uuid},
				"productName":           object{"string": "Fake GPU"},
				"cudaComputeCapability": object{"version": "8.9.0"},
			},
			"capacity": object{"memory": object{"value": "24Gi"}},
		})
	}
	slice := object{
		"apiVersion": "resource.k8s.io/v1",
		"kind":       "ResourceSlice",
		"metadata": object{
			"name": d.node + "-" + driverName,
			"ownerReferences": []object{{
				"apiVersion": "v1", "kind": "Node", "name": d.node, "uid": node.Metadata.UID, "controller": true,
			}},
		},
		"spec": object{
			"driver":   driverName,
			"nodeName": d.node,
			"pool":     object{"name": d.node, "generation": 1, "resourceSliceCount": 1},
			"devices":  devices,
		},
	}
	return d.server.call("POST", api+"/resourceslices", slice, nil)
}

func (d *driver) NodePrepareResources(_ context.Context, request *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	response := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	for _, claim := range request.Claims {
		devices, err := d.prepare(claim)
		prepared := &dra.NodePrepareResourceResponse{Devices: devices}
		if err != nil {
			prepared = &dra.NodePrepareResourceResponse{Error: err.Error()}
		}
		response.Claims[claim.Uid] = prepared
	}
	return response, nil
}

func (d *driver) NodeUnprepareResources(_ context.Context, request *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	response := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, claim := range request.Claims {
		unprepared := &dra.NodeUnprepareResourceResponse{}
		if err := os.Remove(cdiFile(claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			unprepared.Error = err.Error()
		}
		response.Claims[claim.Uid] = unprepared
	}
	return response, nil
}

// prepare describes the devices that a claim was given to the container runtime.
func (d *driver) prepare(claim *dra.Claim) ([]*dra.Device, error) {
	var found struct {
		Metadata struct{ UID string }
		Status   struct {
			Allocation struct {
				Devices struct {
					Results []struct{ Request, Driver, Pool, Device string }
				}
			}
		}
	}
	path := fmt.Sprintf("%s/namespaces/%s/resourceclaims/%s", api, claim.Namespace, claim.Name)
	if err := d.server.call("GET", path, nil, &found); err != nil {
		return nil, err
	}
	if found.Metadata.UID != claim.Uid {
		return nil, fmt.Errorf("%s/%s is another claim by now", claim.Namespace, claim.Name)
	}
	var devices []*dra.Device
	var described []object
	for _, result := range found.Status.Allocation.Devices.Results {
		if result.Driver != driverName || result.Pool != d.node {
			continue
		}
		index, err := strconv.Atoi(strings.TrimPrefix(result.Device, "gpu-"))
		if err != nil || index < 0 || index >= len(d.uuids) {
			return nil, fmt.Errorf("%s is no device of %s", result.Device, d.node)
		}
		name := claim.Uid + "-" + result.Device
		described = append(described, object{
			"name": name,
			"containerEdits": object{
				"env":         []string{fmt.Sprintf("GPU_DEVICE_%d=%s", index, d.uuids[index])},
				"deviceNodes": []object{{"path": fmt.Sprintf("/dev/nvidia%d", index), "hostPath": "/dev/null"}},
			},
		})
		devices = append(devices, &dra.Device{
			RequestNames: []string{result.Request},
			PoolName:     result.Pool,
			DeviceName:   result.Device,
			CdiDeviceIds: []string{cdiKind + "=" + name},
		})
		log.Print("prepared ", result.Device, " for ", claim.Namespace, "/", claim.Name)
	}
	spec := object{
		"cdiVersion": "0.6.0",
		"kind":       cdiKind,
		"devices":    described,
		// What NVIDIA's runtime would add by this variable is the claim's to decide.
		"containerEdits": object{"env": []string{"NVIDIA_VISIBLE_DEVICES=void"}},
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	return devices, os.WriteFile(cdiFile(claim), text, 0o644)
}

func cdiFile(claim *dra.Claim) string {
	return filepath.Join(cdiFiles, driverName+"-"+claim.Uid+".json")
}

// apiServer is the cluster's API for the user of a kubeconfig.
type apiServer struct {
	url    string
	client *http.Client
}

// newAPIServer reads a kubeconfig of JSON that names files, as the harness writes them.
func newAPIServer(kubeconfig string) (apiServer, error) {
	var config struct {
		Clusters []struct {
			Cluster struct {
				Server    string
				Authority string `json:"certificate-authority"`
			}
		}
		Users []struct {
			User struct {
				Certificate string `json:"client-certificate"`
				Key         string `json:"client-key"`
			}
		}
	}
	text, err := os.ReadFile(kubeconfig)
	if err != nil {
		return apiServer{}, err
	}
	if err := json.Unmarshal(text, &config); err != nil || len(config.Clusters) == 0 || len(config.Users) == 0 {
		return apiServer{}, fmt.Errorf("%s: no cluster and user in it: %w", kubeconfig, err)
	}
	cluster, user := config.Clusters[0].Cluster, config.Users[0].User
	authority, err := os.ReadFile(cluster.Authority)
	if err != nil {
		return apiServer{}, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	certificate, err := tls.LoadX509KeyPair(user.Certificate, user.Key)
	if err != nil {
		return apiServer{}, err
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{certificate}}}
	return apiServer{cluster.Server, &http.Client{Transport: transport, Timeout: 10 * time.Second}}, nil
}

// call sends body, if any, and reads the answer into answer, if any. What exists already is as good as created.
func (s apiServer) call(method, path string, body, answer any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequest(method, s.url+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := s.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if !slices.Contains([]int{http.StatusOK, http.StatusCreated, http.StatusConflict}, response.StatusCode) {
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, said)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(said, answer)
}
