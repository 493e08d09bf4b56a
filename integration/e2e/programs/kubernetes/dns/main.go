// SPDX-License-Identifier: Apache-2.0

// Command dns is the DNS server of a test cluster, for Services, headless Services and Pods in cluster.local, over UDP and TCP.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os/signal"
	"strings"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig `file` of the cluster")
	listen := flag.String("listen", ":53", "`addresses` to listen on, with commas between them")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *kubeconfig, strings.Split(*listen, ",")); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, kubeconfig string, addresses []string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	z := dnsZone{factory.Core().V1().Services().Lister(), factory.Discovery().V1().EndpointSlices().Lister()}
	factory.Start(ctx.Done())
	for kind, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return fmt.Errorf("the list of %v was not complete before the end", kind)
		}
	}
	ended := make(chan error, 2*len(addresses))
	for _, address := range addresses {
		packets, err := net.ListenPacket("udp", address)
		if err != nil {
			return fmt.Errorf("listen on udp %s: %w", address, err)
		}
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("listen on tcp %s: %w", address, err)
		}
		go func() { ended <- servePackets(packets, z) }()
		go func() { ended <- serveStreams(listener, z) }()
	}
	log.Printf("serving %s on %s", domain, strings.Join(addresses, " "))
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return nil
	}
}

func servePackets(packets net.PacketConn, z dnsZone) error {
	buffer := make([]byte, 4096)
	for {
		n, from, err := packets.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue // an ICMP error for an earlier answer
		}
		if reply := z.replyTo(buffer[:n], maxPacket); reply != nil {
			if _, err := packets.WriteTo(reply, from); err != nil {
				log.Printf("answer to %s: %v", from, err)
			}
		}
	}
}

func serveStreams(listener net.Listener, z dnsZone) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		go serveStream(conn, z)
	}
}
