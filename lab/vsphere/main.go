// A vCenter with worker VMs that have vGPUs: govmomi's simulator, which answers, and what it lacks.
//
// It serves TLS with a given certificate, on 127.0.0.1 if nothing else is asked for, and accepts one user. Standard input has one command in JSON a
// line, standard output one answer a line, the first of them the port: {"port":40001}. It ends with its standard input.
package main

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/url"
	"os"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/types"
)

func main() {
	address := flag.String("address", "127.0.0.1", "the address to listen on, which the certificate has")
	port := flag.Int("port", 0, "the port, which a restart keeps; 0 for a free one")
	certificate := flag.String("certificate", "", "PEM file of the server's certificate")
	key := flag.String("key", "", "PEM file of its key")
	user := flag.String("user", "", "the user; the password is in $VSPHERE_PASSWORD")
	state := flag.String("state", "", "file that keeps the VMs' power and vGPU types over a restart")
	idle := flag.String("session-timeout", "30m", "how long a session lasts without requests")
	workers := flag.Int("workers", 5, "the number of VMs")
	flag.Parse()

	pair, err := tls.LoadX509KeyPair(*certificate, *key)
	if err != nil {
		log.Fatal(err)
	}
	model := simulator.VPX()
	model.Cluster, model.Host, model.Machine = 0, 1, *workers
	defer model.Remove()
	if err := model.Create(); err != nil {
		log.Fatal(err)
	}
	lab := newLab(model, *state)
	model.Map().OptionManager().UpdateOptions(&types.UpdateOptions{ChangedValue: []types.BaseOptionValue{
		&types.OptionValue{Key: "config.vmacore.soap.sessionTimeout", Value: *idle},
	}})
	model.Map().Handler = lab.delay
	model.Service.Listen = &url.URL{
		Host: fmt.Sprintf("%s:%d", *address, *port),
		User: url.UserPassword(*user, os.Getenv("VSPHERE_PASSWORD")),
	}
	model.Service.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	server := model.Service.NewServer()
	fmt.Printf("{\"port\":%s}\n", server.URL.Port())

	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var order command
		if err := json.Unmarshal(lines.Bytes(), &order); err != nil {
			log.Fatal(err)
		}
		answer, err := json.Marshal(lab.obey(order))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(answer))
	}
}
