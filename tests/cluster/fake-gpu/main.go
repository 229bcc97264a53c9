// A device plugin that offers GPUs which are not there: the kubelet schedules and allocates them as it would real ones.
// A container that asks for one gets its name in NVIDIA_VISIBLE_DEVICES and /dev/null as /dev/nvidia0.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	endpoint = "hearth-fake-gpu.sock"
)

type plugin struct {
	api.UnimplementedDevicePluginServer
	devices []*api.Device
}

func (plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		log.Print("allocated ", container.DevicesIds)
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
			Devices: []*api.DeviceSpec{{HostPath: "/dev/null", ContainerPath: "/dev/nvidia0", Permissions: "rw"}},
		})
	}
	return response, nil
}

// serve listens on the plugin's socket and registers it, then waits until the kubelet, which empties the directory of
// sockets when it starts, has removed it.
func serve(p plugin) error {
	socket := api.DevicePluginPath + endpoint
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	defer server.Stop()
	api.RegisterDevicePluginServer(server, p)
	go server.Serve(listener)

	kubelet, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer kubelet.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	registration := &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: resource}
	if _, err := api.NewRegistrationClient(kubelet).Register(ctx, registration); err != nil {
		return err
	}
	log.Print("registered ", len(p.devices), " of ", resource)
	for {
		time.Sleep(500 * time.Millisecond)
		if _, err := os.Stat(socket); err != nil {
			return err
		}
	}
}

func main() {
	count := flag.Int("count", 2, "how many GPUs the node has")
	flag.Parse()
	p := plugin{}
	for i := range *count {
		p.devices = append(p.devices, &api.Device{
			ID:       fmt.Sprintf("GPU-fake-%d", i),
			Health:   api.Healthy,
			Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: 0}}},
		})
	}
	for {
		log.Print(serve(p))
		time.Sleep(200 * time.Millisecond)
	}
}
