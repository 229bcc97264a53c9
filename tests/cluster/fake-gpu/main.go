// A device plugin that offers GPUs which are not there: the kubelet schedules and allocates them as it would real ones.
// A container that asks for one gets its name in NVIDIA_VISIBLE_DEVICES and /dev/null as /dev/nvidia0. With --dra it is a
// driver of dynamic resource allocation instead.
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
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	endpoint = "hearth-fake-gpu.sock"
)

type plugin struct {
	deviceplugin.UnimplementedDevicePluginServer
	devices []*deviceplugin.Device
}

func (plugin) GetDevicePluginOptions(context.Context, *deviceplugin.Empty) (*deviceplugin.DevicePluginOptions, error) {
	return &deviceplugin.DevicePluginOptions{}, nil
}

func (p plugin) ListAndWatch(_ *deviceplugin.Empty, stream deviceplugin.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&deviceplugin.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (plugin) Allocate(_ context.Context, request *deviceplugin.AllocateRequest) (*deviceplugin.AllocateResponse, error) {
	response := &deviceplugin.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		log.Print("allocated ", container.DevicesIds)
		response.ContainerResponses = append(response.ContainerResponses, &deviceplugin.ContainerAllocateResponse{
			Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
			Devices: []*deviceplugin.DeviceSpec{{HostPath: "/dev/null", ContainerPath: "/dev/nvidia0", Permissions: "rw"}},
		})
	}
	return response, nil
}

// serve listens on the plugin's socket and registers it, then waits until the kubelet, which empties the directory of
// sockets when it starts, has removed it.
func serve(p plugin) error {
	socket := deviceplugin.DevicePluginPath + endpoint
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	defer server.Stop()
	deviceplugin.RegisterDevicePluginServer(server, p)
	go server.Serve(listener)

	kubelet, err := grpc.NewClient("unix://"+deviceplugin.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer kubelet.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	registration := &deviceplugin.RegisterRequest{Version: deviceplugin.Version, Endpoint: endpoint, ResourceName: resource}
	if _, err := deviceplugin.NewRegistrationClient(kubelet).Register(ctx, registration); err != nil {
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
	isDra := flag.Bool("dra", false, "be a driver of dynamic resource allocation")
	node := flag.String("node", "", "with --dra: the node's name")
	kubeconfig := flag.String("kubeconfig", "", "with --dra: a kubeconfig of the node's user")
	flag.Parse()
	prefix := "GPU-fake-"
	if *isDra {
		// In the whole cluster there is one of each.
		prefix += *node + "-"
	}
	var uuids []string
	for i := range *count {
		uuids = append(uuids, fmt.Sprint(prefix, i))
	}
	if *isDra {
		log.Fatal(serveDra(*node, *kubeconfig, uuids))
	}
	p := plugin{}
	for _, uuid := range uuids {
		p.devices = append(p.devices, &deviceplugin.Device{
			ID:       uuid,
			Health:   deviceplugin.Healthy,
			Topology: &deviceplugin.TopologyInfo{Nodes: []*deviceplugin.NUMANode{{ID: 0}}},
		})
	}
	for {
		log.Print(serve(p))
		time.Sleep(200 * time.Millisecond)
	}
}
