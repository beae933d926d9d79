// Prints the device nodes that Kata's cold plug would find for a pod, as JSON.
//
// It does what Kata's runtime in Go does before it starts the VM (coldPlugWithAPI, WithCDI; read in Kata 4.1.0): it asks
// the kubelet's pod-resources API for one pod, names each device RESOURCE=ID, reads all CDI specs again, and has the CDI
// library add the devices to an OCI spec. Each error fails the pod there, and this program here.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/container-orchestrated-devices/container-device-interface/pkg/cdi"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// node is a device node of the OCI spec. Numbers of the kernel are found by the library, from the node on the host.
type node struct {
	Path  string `json:"path"`
	Type  string `json:"type"`
	Major int64  `json:"major"`
	Minor int64  `json:"minor"`
}

type found struct {
	Devices []string `json:"devices"`
	Nodes   []node   `json:"nodes"`
}

func main() {
	socket := flag.String("socket", "/var/lib/kubelet/pod-resources/kubelet.sock", "the kubelet's pod-resources socket")
	namespace := flag.String("namespace", "default", "the pod's namespace")
	folders := flag.String("spec-dirs", "/etc/cdi,/var/run/cdi", "the folders of CDI specs, the least important first")
	flag.Parse()
	result, err := coldPlug(*socket, *namespace, flag.Arg(0), strings.Split(*folders, ","))
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func coldPlug(socket, namespace, pod string, folders []string) (*found, error) {
	devices, err := devicesOf(socket, namespace, pod)
	if err != nil {
		return nil, fmt.Errorf("pod-resources: %w", err)
	}
	result := &found{Devices: devices, Nodes: []node{}}
	if len(devices) == 0 {
		return result, nil
	}
	registry := cdi.GetRegistry(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(folders...))
	if err := registry.Refresh(); err != nil {
		return nil, fmt.Errorf("refresh: %w", err)
	}
	spec := &oci.Spec{Linux: &oci.Linux{}}
	if _, err := registry.InjectDevices(spec, devices...); err != nil {
		return nil, fmt.Errorf("inject: %w", err)
	}
	for _, device := range spec.Linux.Devices {
		result.Nodes = append(result.Nodes, node{device.Path, device.Type, device.Major, device.Minor})
	}
	return result, nil
}

func devicesOf(socket, namespace, pod string) ([]string, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	request := &podresources.GetPodResourcesRequest{PodName: pod, PodNamespace: namespace}
	answer, err := podresources.NewPodResourcesListerClient(connection).Get(ctx, request)
	if err != nil {
		return nil, err
	}
	devices := []string{}
	for _, container := range answer.GetPodResources().GetContainers() {
		for _, held := range container.GetDevices() {
			for _, id := range held.GetDeviceIds() {
				devices = append(devices, held.GetResourceName()+"="+id)
			}
		}
	}
	return devices, nil
}
